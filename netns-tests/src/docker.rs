//! A container on a host, with the rules of iptables that Docker sets for a port that it publishes.

use std::net::{SocketAddr, TcpStream};

use anyhow::Result;
use dibs_lab::{Lab, LinkSpec};
use dibs_netns::Host;
use nix::unistd::geteuid;

use crate::topology::server;
use crate::traffic::connect_translated;

/// Port of the host, which leads to port 80 of the container.
pub const PORT: u16 = 8080;

/// As Docker 24 sets them, with its bridge `docker0`.
const RULES: &str = "iptables-restore --noflush <<'END'
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-I FORWARD -i docker0 -o docker0 -j ACCEPT
-I FORWARD -i docker0 ! -o docker0 -j ACCEPT
-I FORWARD -o docker0 -j DOCKER
-I FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-USER
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
-A DOCKER-ISOLATION-STAGE-2 -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
END";

/// Restart of Docker, as far as its chains show it.
const FORGOTTEN: &str = "iptables -t nat -F PREROUTING; iptables -t nat -F OUTPUT; iptables -t nat -F POSTROUTING
iptables -t nat -F DOCKER; iptables -F DOCKER; iptables -F DOCKER-USER
iptables -F DOCKER-ISOLATION-STAGE-1; iptables -F DOCKER-ISOLATION-STAGE-2
for rule in '-j DOCKER-USER' '-j DOCKER-ISOLATION-STAGE-1' '-o docker0 -j DOCKER' \
    '-o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT' '-i docker0 -o docker0 -j ACCEPT' \
    '-i docker0 ! -o docker0 -j ACCEPT'; do iptables -D FORWARD $rule; done";

/// Container `172.17.0.2` on `host`, which publishes [`PORT`].
///
/// # Errors
/// If the system does not let it.
pub fn publish(lab: &mut Lab, host: &Host) -> Result<Host> {
    let container = lab.host("container")?;
    lab.link(LinkSpec::new(
        host,
        "veth0",
        "",
        &container,
        "eth0",
        "172.17.0.2/16",
    ))?;
    host.shell(
        "ip link add docker0 type bridge\n\
         ip link set veth0 master docker0\n\
         ip address add 172.17.0.1/16 dev docker0\n\
         ip link set docker0 up",
    )?;
    container.run("ip route add default via 172.17.0.1")?;
    host.sysctl("net/ipv4/ip_forward", "1")?;
    guard(host)?;
    Ok(container)
}

/// Rules of a Docker that begins on a host.
///
/// # Errors
/// If the system does not let it.
pub fn guard(host: &Host) -> Result<()> {
    host.shell(RULES).map(drop)
}

/// Docker ends, and begins again.
///
/// # Errors
/// If the system does not let it.
pub fn restart(host: &Host) -> Result<()> {
    host.shell(FORGOTTEN)?;
    guard(host)
}

/// A connection from a host to the published port of [`server`].
///
/// # Errors
/// If it does not come about.
pub fn connect(from: &Host, container: &Host) -> Result<(TcpStream, TcpStream)> {
    let listens = SocketAddr::from(([172, 17, 0, 2], 80));
    connect_translated(geteuid(), 0, from, container, [listens, server(PORT)])
}
