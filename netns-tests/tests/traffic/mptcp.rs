//! The subflows of an MPTCP connection move together, or stay.

use std::net::{SocketAddr, TcpStream};

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::server;
use netns_tests::{Net, Setup, isolated};
use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};

/// IPPROTO_MPTCP.
const MPTCP: i32 = 262;

/// An MPTCP connection from `a` to a port of `b`, and who listens there: without that no other subflow comes about.
fn connect(net: &Net, to: SocketAddr) -> Result<((TcpStream, TcpStream), Socket)> {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::from(MPTCP)));
    let listener = net.b.host.in_ns(|| -> std::io::Result<Socket> {
        let listener = socket()?;
        listener.bind(&to.into())?;
        listener.listen(1)?;
        Ok(listener)
    });
    let listener = listener.context("MPTCP, which the kernel has since Linux 5.6")?;
    let near = net.a.host.in_ns(|| -> std::io::Result<Socket> {
        let near = socket()?;
        near.connect(&to.into())?;
        Ok(near)
    })?;
    let (far, _) = listener.accept()?;
    Ok(((near.into(), far.into()), listener))
}

/// The subflows on `a`, with their bumps, once there are so many of one connection.
fn subflows(net: &Net, count: usize) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    wait("subflows", || {
        let conns = net.a.ctl(&["conn", "list"]).unwrap_or_default();
        let conns = conns.as_array().cloned().unwrap_or_default();
        let of_mptcp = |conn: &Value| conn["mptcp"].as_u64().is_some();
        seen = conns.into_iter().filter(of_mptcp).collect();
        seen.len() == count && seen.iter().all(|conn| conn["mptcp"] == seen[0]["mptcp"])
    })?;
    let bump = |conn: &Value| conn["bump"].as_str().map(str::to_owned);
    seen.iter()
        .map(|conn| bump(conn).context("a bump"))
        .collect()
}

/// The reasons for which a command on `a` leaves connections where they are: each one has its own.
fn left_out(net: &Net, arguments: &[&str]) -> Result<Vec<String>> {
    let output = net.a.host.spawn(net.a.dibsctl(arguments))?.output(SOON)?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let changed: Value = serde_json::from_slice(&output.stdout)?;
    let skipped = changed["skipped"].as_array().into_iter().flatten();
    let why = |skipped: &Value| skipped["reason"].as_str().map(str::to_owned);
    skipped
        .map(|skipped| why(skipped).context("a reason"))
        .collect()
}

#[test]
fn subflows_move_together_or_stay() {
    isolated(|| {
        Setup::new().run(|net| {
            for host in [&net.a.host, &net.b.host] {
                host.run("ip mptcp limits set subflow 4 add_addr_accepted 4")?;
            }
            // A second subflow goes to another port.
            net.b
                .host
                .run("ip mptcp endpoint add 10.0.1.2 port 7001 signal")?;
            let (mut conn, _listener) = connect(net, server(7000))?;
            netns_tests::routed::exchange(&mut conn, 10_000)?;
            ensure!(subflows(net, 2)? == ["plain", "plain"]);
            // Only one of them is named.
            net.a.ctl(&["enable", "--dport", "7000"])?;
            ensure!(subflows(net, 2)? == ["scramble", "scramble"]);
            netns_tests::routed::exchange(&mut conn, 100_000)?;
            net.a.ctl(&["disable", "--dport", "7001"])?;
            ensure!(subflows(net, 2)? == ["plain", "plain"]);
            netns_tests::routed::exchange(&mut conn, 100_000)?;

            // The kernel binds the third to the device that it is told.
            net.a.host.run("ip address add 10.0.1.11/24 dev eth0")?;
            net.a
                .host
                .run("ip mptcp endpoint add 10.0.1.11 dev eth0 subflow")?;
            netns_tests::routed::exchange(&mut conn, 10_000)?;
            ensure!(subflows(net, 3)? == ["plain"; 3]);
            let mut whys = left_out(net, &["enable", "--dport", "7000"])?;
            // In the order of the kernel's list.
            whys.sort_unstable_by_key(|why| {
                why.contains("another subflow of its MPTCP connection")
            });
            ensure!(
                whys.len() == 3
                    && whys[0].starts_with("its socket is bound to a device")
                    && whys[1..].iter().all(|why| {
                        why.contains("another subflow of its MPTCP connection")
                            && why.contains("bound to a device")
                    }),
                "{whys:?}"
            );
            ensure!(subflows(net, 3)? == ["plain"; 3]);
            for more in [&[][..], &["--require"]] {
                let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
                let said = net.a.refused(&[&rule[..], more].concat())?;
                ensure!(said.contains("MPTCP"), "{said}");
            }
            ensure!(subflows(net, 3)? == ["plain"; 3]);
            netns_tests::routed::exchange(&mut conn, 100_000)
        })
    });
}
