//! What a peer may open: connections that come out of the TUN, to which addresses and ports of the host.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{abort, connect};
use netns_tests::{Net, Setup, isolated};
use serde_json::json;
use socket2::{Domain, Socket, Type};

/// An address of `b` as container engines give to a bridge: no path's interface has it.
fn bridge(port: u16) -> SocketAddr {
    SocketAddr::from(([172, 17, 0, 1], port))
}

/// Two hosts of which `b` has a bridge too, which `a` takes for the peer's; what `a` opens to ports from 7000 to 7009
/// is on a bump from its start. `accept` is that line of `b`'s configuration.
fn with_bridge(accept: &str, test: impl FnOnce(&mut Net) -> Result<()>) -> Result<()> {
    let rule = "bump = \"seal\"\ndport = \"7000-7009\"";
    Setup::new().rule(rule).without_daemons().run(|net| {
        net.b.host.shell(
            "ip link add br0 type bridge; ip address add 172.17.0.1/16 dev br0; ip link set br0 up",
        )?;
        net.a.host.run("ip route add 172.17.0.1/32 via 10.0.1.2")?;
        for (node, old, new) in [
            (
                &net.a,
                "\"10.0.1.2/32\"",
                "\"10.0.1.2/32\", \"172.17.0.1/32\"".to_owned(),
            ),
            (
                &net.b,
                "[peer.endpoints]",
                format!("{accept}\n\n[peer.endpoints]"),
            ),
        ] {
            let file = node.directory().join("dibsd.toml");
            let config = std::fs::read_to_string(&file)?;
            ensure!(config.matches(old).count() == 1, "{config}");
            std::fs::write(&file, config.replacen(old, &new, 1))?;
        }
        net.start()?;
        test(net)
    })
}

/// A connection of `a`'s to here comes about, on its bump.
fn comes_about(net: &Net, to: SocketAddr) -> Result<()> {
    let ends = connect(&net.a.host, &net.b.host, to)?;
    net.a.wait_bump(to.port(), "seal")?;
    abort(ends)
}

/// A SYN to here comes to nobody's ears, and is counted.
fn is_refused(net: &Net, to: SocketAddr) -> Result<()> {
    let refused = || net.b.counter("connection_refused");
    let before = refused()?;
    let listener = net.b.host.in_ns(|| TcpListener::bind(to))?;
    listener.set_nonblocking(true)?;
    let calling = net.a.host.in_ns(|| -> std::io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => Err(error),
            _ => Ok(socket),
        }
    })?;
    let mut accepted = false;
    wait("the call to be refused or taken", || {
        accepted =
            !matches!(listener.accept(), Err(error) if error.kind() == ErrorKind::WouldBlock);
        accepted || refused().is_ok_and(|now| now > before)
    })?;
    drop(calling);
    ensure!(!accepted, "{to} can be opened");
    Ok(())
}

fn accepts(net: &Net) -> Result<serde_json::Value> {
    let peers = net.b.ctl(&["peer", "list"])?;
    peers
        .get(0)
        .map(|peer| peer["accept"].clone())
        .context("no peer")
}

#[test]
fn a_peer_opens_connections_to_the_addresses_of_paths() {
    isolated(|| {
        with_bridge("", |net| {
            comes_about(net, server(7000))?;
            is_refused(net, bridge(7000))?;
            ensure!(accepts(net)? == json!(["paths"]));
            // The address is a path's from now on.
            net.b.host.shell(
                "ip address del 172.17.0.1/16 dev br0; ip address add 172.17.0.1/32 dev eth0",
            )?;
            wait("the address to be known as the path's", || {
                is_refused(net, bridge(7001)).is_err()
            })?;
            comes_about(net, bridge(7002))
        })
    });
}

#[test]
fn a_peer_opens_what_the_file_names() {
    isolated(|| {
        with_bridge(
            "accept = [7001, \"7003-7004\", \"172.17.0.1:7000\"]",
            |net| {
                is_refused(net, server(7000))?;
                comes_about(net, server(7001))?;
                is_refused(net, server(7002))?;
                comes_about(net, server(7004))?;
                comes_about(net, bridge(7000))?;
                is_refused(net, bridge(7001))?;
                let expected = json!(["7001", "7003-7004", "172.17.0.1:7000"]);
                ensure!(accepts(net)? == expected, "{}", accepts(net)?);
                Ok(())
            },
        )
    });
}

#[test]
fn a_peer_opens_everything_if_the_file_says_so() {
    isolated(|| {
        with_bridge("accept = \"any\"", |net| {
            comes_about(net, server(7000))?;
            comes_about(net, bridge(7000))
        })
    });
}

/// What this host opens, and what was there before its bump, goes on although the peer may open nothing.
#[test]
fn what_the_peer_does_not_begin_is_not_judged() {
    isolated(|| {
        with_bridge("accept = []", |net| {
            is_refused(net, server(7000))?;
            // A connection of the peer's that came in plain.
            let talk = net.talk(7010)?;
            net.a.enable(7010)?;
            net.wait_bump(7010, "scramble")?;
            talk.advance(64 << 10)?;
            talk.finish()?;
            // One that this host opens by a bump, from its first segment.
            net.b
                .ctl(&["rule", "add", "--dport", "7020", "--bump", "seal"])?;
            let to = SocketAddr::from(([10, 0, 1, 1], 7020));
            let ends = connect(&net.b.host, &net.a.host, to)?;
            net.b.wait_bump(7020, "seal")?;
            abort(ends)
        })
    });
}
