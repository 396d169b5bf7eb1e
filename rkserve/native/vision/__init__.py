"""The image encoder's process side: ``librknnrt.so`` and a cache of encoded images."""
