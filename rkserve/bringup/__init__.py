"""Bring-up of a cluster's nodes: Ray on the head and on boards, joining, and an orderly end."""
