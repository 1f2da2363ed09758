# Packages of the host's distribution, over what the host has: their files become part of this layer.
mkdir -p /etc/apt/apt.conf.d /var/lib/apt/lists/partial /var/cache/apt/archives/partial /var/log/apt
cp -r /run/minisandbox/apt/. /etc/apt/
cp -r --no-preserve=ownership /run/minisandbox/dpkg /var/lib/ 2> /dev/null || [ -s /var/lib/dpkg/status ]
for name in passwd group; do  # whom the host's packages gave their files to
    cut -d: -f1 "/etc/$name" > /tmp/build/known
    awk -F: 'NR == FNR { known[$1]; next } !($1 in known)' /tmp/build/known "/tmp/build/$name" >> "/etc/$name"
done
rm -f /var/lib/dpkg/lock* /var/lib/apt/lists/lock
printf '%s\n' 'APT::Sandbox::User "root";' 'Dpkg::Use-Pty "0";' 'APT::Install-Recommends "0";' > /etc/apt/apt.conf.d/build
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d  # no service is started by an installation
chmod 755 /usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
mapfile -t packages < /tmp/build/packages
apt-get -q -y install "${packages[@]}"
dpkg-query -W -f '${Package}=${Version}\n' "${packages[@]%%=*}" > /tmp/build/versions
rm -f /usr/sbin/policy-rc.d
rm -rf /var/lib/dpkg /var/lib/apt /var/cache/* /var/log/* /etc/apt
