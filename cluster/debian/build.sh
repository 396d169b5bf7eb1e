#!/bin/sh
# Builds the Debian packages of an offline folder ($1) into a folder ($2): `make deb`.
#
# rkserve (all) has rkserve itself, its units and the steps of a node; rkserve-wheels-cp311 (arm64, amd64) has the packages that
# it needs, for one Python. The virtual environment is made by postinst: one that is in the package would be bound to
# one Python of one distribution, and could not stay beside the version before.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
offline=$(cd "$1" && pwd)
mkdir -p "$2"
into=$(cd "$2" && pwd)
wheel=$(basename "$offline"/rkserve-*.whl)
version=$(echo "$wheel" | cut -d - -f 2)
epoch=$(git -C "$here" log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH="$epoch"
maintainer="The authors of rkserve <rkserve@users.noreply.github.com>"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
umask 022

# Package, architecture, further fields, description, compression; the files are in $scratch/$1.
build() {
    docs=$scratch/$1/usr/share/doc/$1
    mkdir -p "$docs" "$scratch/$1/DEBIAN"
    cp "$here/copyright" "$docs/copyright"
    printf '%s (%s) stable; urgency=medium\n\n  * See CHANGELOG.md of rkserve.\n\n -- %s  %s\n' \
        "$1" "$version" "$maintainer" "$(LC_ALL=C date -u -R -d "@$epoch")" | gzip -9n >"$docs/changelog.gz"
    cat >"$scratch/$1/DEBIAN/control" <<END
Package: $1
Version: $version
Architecture: $2
Maintainer: $maintainer
Installed-Size: $(du -sk "$scratch/$1" | cut -f 1)
Section: misc
Priority: optional
$3
Description: $4
END
    (cd "$scratch/$1" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | sort | xargs md5sum >DEBIAN/md5sums)
    find "$scratch/$1" -newermt "@$epoch" -exec touch --no-dereference --date="@$epoch" {} +
    # shellcheck disable=SC2086 # the options are several words
    dpkg-deb --root-owner-group $5 --build "$scratch/$1" "$into/$1_${version}_$2.deb"
}

root=$scratch/rkserve
mkdir -p "$root/DEBIAN" "$root/usr/share/rkserve" "$root/usr/share/man/man1" "$root/usr/share/man/man8" \
    "$root/usr/lib/systemd/system" "$root/usr/lib/udev/rules.d" "$root/usr/bin" "$root/usr/sbin" "$root/etc/rkserve"
cp "$offline/$wheel" "$offline"/pip-*.whl "$offline/requirements.lock" "$here/../serve_config.rk3588.yaml" "$root/usr/share/rkserve"
cp "$offline"/systemd/*.service "$root/usr/lib/systemd/system"
cp "$offline/systemd/60-rkserve.rules" "$root/usr/lib/udev/rules.d"
cp "$offline/systemd/rkserve.env" "$root/etc/rkserve"
install -m 755 "$here/rkserve" "$root/usr/bin/rkserve"
install -m 755 "$offline/rkserve-node" "$root/usr/sbin/rkserve-node"
gzip -9nc "$here/rkserve.1" >"$root/usr/share/man/man1/rkserve.1.gz"
gzip -9nc "$here/rkserve-node.8" >"$root/usr/share/man/man8/rkserve-node.8.gz"
for script in postinst prerm postrm; do
    install -m 755 "$here/$script" "$root/DEBIAN/$script"
done
cp "$here/triggers" "$root/DEBIAN/triggers"
echo /etc/rkserve/rkserve.env >"$root/DEBIAN/conffiles"
suggests=$(for minor in 10 11 12 13; do printf 'rkserve-wheels-cp3%s, ' "$minor"; done)
build rkserve all "Depends: python3 (>= 3.10), libgomp1, passwd
Suggests: ${suggests%, }" "serve language models on clusters of Rockchip boards
 One OpenAI-compatible endpoint over boards whose NPU runs models with the
 vendor's librkllmrt.so, which is not part of this package.
 .
 The Python packages that it needs are in rkserve-wheels-cp311 and the like;
 they are installed into /opt/rkserve, beside the version before." -Zxz

for archive in "$offline"/wheels/wheels-*.tar; do
    [ -f "$archive" ] || continue
    tag=$(basename "$archive" .tar | cut -d - -f 2-)
    case $tag in
        *-aarch64) architecture=arm64 ;;
        *) architecture=amd64 ;;
    esac
    name=rkserve-wheels-${tag%%-*}
    rm -rf "${scratch:?}/$name"
    mkdir -p "$scratch/$name/usr/share/rkserve/wheels"
    cp "$archive" "$scratch/$name/usr/share/rkserve/wheels"
    build "$name" "$architecture" "Enhances: rkserve" "Python packages that rkserve needs, for one version of Python
 Wheels of requirements.lock of rkserve for CPython ${tag%%-*}, from PyPI. rkserve
 installs them when this package arrives." "-Zxz -z0" # wheels are compressed
done
