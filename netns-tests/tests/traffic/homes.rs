//! Laptops behind routers that translate addresses, and a server whose address is translated, too.

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::homes::Homes;
use netns_tests::isolated;
use netns_tests::routed::exchange;
use nix::sys::signal::Signal;

/// Bytes of an exchange.
const SOME: usize = 200_000;
/// The port that connections come from, on both laptops.
const FROM: u16 = 40_000;

/// The ends of connections on `b`, as `b` and as the laptops call them, in order.
fn ends(net: &Homes) -> Result<Vec<[String; 4]>> {
    let conns = net.b.ctl(&["conn", "list"])?;
    let keys = ["local", "remote", "local_there", "remote_there"];
    let conns = conns.as_array().into_iter().flatten();
    let mut ends: Vec<_> = conns
        .map(|conn| keys.map(|key| conn[key].as_str().unwrap_or_default().to_owned()))
        .collect();
    ends.sort();
    Ok(ends)
}

fn rules(net: &Homes) -> Result<()> {
    for laptop in &net.laptops {
        laptop.ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
    }
    Ok(())
}

/// Both have the same address and port, so the server knows them by addresses that it lends them.
#[test]
fn two_laptops_with_the_same_addresses_have_a_server_at_once() {
    isolated(|| {
        Homes::run(|net| {
            rules(net)?;
            let mut conns = [net.connect(0, FROM, 7000)?, net.connect(1, FROM, 7000)?];
            let mut talk = |what: &str| -> Result<()> {
                for conn in &mut conns {
                    exchange(conn, SOME).map_err(|error| error.context(what.to_owned()))?;
                }
                Ok(())
            };
            talk("at first")?;
            let lent = |host: u8| {
                let ends = [
                    "10.0.9.2:7000",
                    &format!("10.77.0.{host}:40000"),
                    "203.0.113.7:7000",
                    "192.168.1.10:40000",
                ];
                ends.map(str::to_owned)
            };
            let seen = ends(net)?;
            ensure!(seen == [lent(2), lent(3)], "{seen:?}");
            // What both ends confirm of a connection is locked, so each understands the other's name of it.
            for laptop in &net.laptops {
                laptop.wait_locked(7000)?;
            }
            for (node, end) in [
                (&net.laptops[0], "--dport"),
                (&net.laptops[1], "--dport"),
                (&net.b, "--sport"),
            ] {
                let said = node.refused(&["disable", end, "7000"])?;
                ensure!(
                    said.contains("the network does not carry it in plain"),
                    "{said}"
                );
                talk("after a disable that was refused")?;
            }
            ensure!(net.b.bumps(7000)? == ["seal", "seal"]);
            // Both names outlive each daemon.
            net.b.stop(Signal::SIGKILL)?;
            net.b.start()?;
            talk("with another daemon at b")?;
            net.laptops[0].stop(Signal::SIGKILL)?;
            net.laptops[0].start()?;
            talk("with another daemon at a")?;
            wait("both names", || {
                ends(net).is_ok_and(|seen| seen == [lent(2), lent(3)])
            })
        })
    });
}

/// The laptop is at another network then, with another address; what it began before goes on, and so do its rules.
#[test]
fn a_laptop_that_moves_to_another_network_keeps_its_connections_and_rules() {
    isolated(|| {
        Homes::run(|net| {
            rules(net)?;
            let mut before = net.connect(0, FROM, 7000)?;
            exchange(&mut before, SOME)?;
            let laptop = &net.laptops[0];
            laptop.wait_locked(7000)?;
            let home = net.homes[0].clone();
            home.run("ip addr add 172.20.3.1/24 dev lan0")?;
            laptop.host.run("ip addr del 192.168.1.10/24 dev lan0")?;
            laptop.host.run("ip addr add 172.20.3.9/24 dev lan0")?;
            laptop.host.run("ip route add default via 172.20.3.1")?;
            exchange(&mut before, SOME)?;
            // From the same port, but another address.
            let mut after = net.connect(0, FROM, 7000)?;
            exchange(&mut after, SOME)?;
            exchange(&mut before, SOME)?;
            let on = net.laptops[0].bumps(7000)?;
            ensure!(on == ["seal", "seal"], "{on:?}");
            let there: Vec<String> = ends(net)?.into_iter().map(|[.., there]| there).collect();
            let both = ["172.20.3.9:40000", "192.168.1.10:40000"];
            ensure!(
                both.iter().all(|end| there.contains(&(*end).to_owned())),
                "{there:?}"
            );
            Ok(())
        })
    });
}

/// `init` alone sets all of it up: the server's line on each laptop, and the laptops' lines on the server.
#[test]
fn a_line_each_is_all_that_laptops_and_a_server_take() {
    isolated(|| {
        Homes::run(|net| {
            for node in net.laptops.iter_mut().chain([&mut net.b]) {
                node.stop(Signal::SIGTERM)?;
                for file in ["dibsd.toml", "private.key"] {
                    std::fs::remove_file(node.directory().join(file))?;
                }
            }
            let of_server = net.b.init(&["--public", "203.0.113.7"])?;
            for laptop in &net.laptops {
                let of_laptop = laptop.init(&["--peer", &of_server])?;
                net.b.init(&["--peer", &of_laptop])?;
            }
            net.b.start()?;
            for laptop in &mut net.laptops {
                laptop.start()?;
                laptop.wait_until_joined(1)?;
            }
            rules(net)?;
            let mut conns = [net.connect(0, FROM, 7000)?, net.connect(1, FROM, 7000)?];
            for conn in &mut conns {
                exchange(conn, SOME)?;
            }
            let remotes: Vec<String> = ends(net)?
                .into_iter()
                .map(|[_, remote, ..]| remote)
                .collect();
            ensure!(
                remotes == ["10.77.0.2:40000", "10.77.0.3:40000"],
                "{remotes:?}"
            );
            Ok(())
        })
    });
}
