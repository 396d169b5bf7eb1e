#!/bin/bash
# A board that joins at Armbian's first login. Fill in the three values and the host name (each board its own), and copy this
# to /root/provisioning.sh of a written card; docs/how-to/provisioning.md has the steps.
#
# Armbian sources this file, so that it must not exit or change options: everything is in a subshell.
(
    set -eu
    hostnamectl set-hostname board01
    grep -q board01 /etc/hosts || echo "127.0.1.1 board01" >>/etc/hosts
    mkdir -p /etc/rkserve
    umask 077
    cat >/etc/rkserve/first-boot.env <<'END'
# The PC serves its offline folder: python3 -m http.server 8080 --directory cluster/offline
RKSERVE_OFFLINE_URL=http://192.168.1.2:8080
# The head, and a token of `rkserve token --minutes 1440` there.
RKSERVE_HEAD_URL=http://192.168.1.10:8000
RKSERVE_JOIN_TOKEN=TOKEN
END
    umask 022
    # shellcheck disable=SC1091 # written above
    . /etc/rkserve/first-boot.env
    python3 -c 'import sys, urllib.request as u; u.urlretrieve(sys.argv[1], sys.argv[2])' \
        "$RKSERVE_OFFLINE_URL/rkserve-node" /usr/local/sbin/rkserve-node
    chmod 755 /usr/local/sbin/rkserve-node
    rkserve-node first-boot
) >>/var/log/rkserve-first-boot.log 2>&1 || echo "rkserve: this board has not joined; see /var/log/rkserve-first-boot.log"
