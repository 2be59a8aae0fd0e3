#!/bin/bash
# Puts the static libraries of moescope-recorder and moescope-unwind from Debian's packages of an architecture into a folder:
# static_libraries.sh amd64|arm64 FOLDER. A private apt fetches the packages and dpkg-deb unpacks them; nothing of them is run.
set -e
arch=$1 folder=$(realpath -m "$2")
packages="libbpf-dev libelf-dev zlib1g-dev libjansson-dev libxxhash-dev libdw-dev liblzma-dev libbz2-dev"
packages+=" libstdc++-$(gcc -dumpversion | cut -d. -f1)-dev"
apt=$folder/apt
rm -rf "$folder"
mkdir -p "$apt"/{lists/partial,cache/archives/partial,state} "$folder"
touch "$apt/state/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ ! -f $keys ] || signed=" signed-by=$keys"
apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
	| sort -u | sed "s|^|deb [arch=$arch$signed] |" > "$apt/sources.list"
cat > "$apt/apt.conf" <<END
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "$apt/state";
Dir::State::Lists "$apt/lists";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
END
export APT_CONFIG=$apt/apt.conf
apt-get update -qq
cd "$folder"
apt-get download -qq $packages
for package in ./*.deb; do
	dpkg-deb -x "$package" .
done
rm -rf "$apt" ./*.deb
