//! Connections of which a firewall changes the numbers, as some do by default: no bump carries them.

use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dibs_io::Tun;
use dibs_netns::Host;
use dibs_wire::packet::{self, Packet};
use dibs_wire::{readdress, virtio};
use netns_tests::homes::Homes;
use netns_tests::isolated;
use netns_tests::routed::{Routed, Router, exchange};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

/// Bytes of an exchange.
const FEW: usize = 10_000;

/// Distance that a firewall adds to numbers, as a rule: more than any window.
const FAR: u32 = 1 << 30;

/// Adds so much to the sequence numbers of what clients send to these ports, or of what servers answer, and takes it from the
/// acknowledgements.
fn renumber(router: &Host, ports: [u16; 2], of_clients: bool, added: u32) -> Result<()> {
    let [first, last] = ports;
    let device = format!("numbers{first}");
    let tun = router.in_ns(|| -> Result<Tun> {
        let tun = Tun::open_plain(&device, 1500)?;
        tun.up()?;
        Ok(tun)
    })?;
    router.sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "0")?;
    router.shell(&format!(
        "ip rule add iif lan0 ipproto tcp dport {first}-{last} lookup {first}\n\
         ip rule add iif wan0 ipproto tcp sport {first}-{last} lookup {first}\n\
         ip route add default dev {device} table {first}\n\
         nft add table ip numbers\n\
         nft 'add chain ip numbers pre {{ type filter hook prerouting priority -300; }}'\n\
         nft add rule ip numbers pre iifname {device} notrack\n\
         nft flush table ip fw"
    ))?;
    router.thread(&device, move || -> Result<()> {
        let mut tun = tun;
        let mut frame = vec![0; dibs_io::FRAME_MAX];
        loop {
            let Ok(len) = tun.recv(&mut frame) else {
                poll(
                    &mut [PollFd::new(tun.as_fd(), PollFlags::POLLIN)],
                    PollTimeout::NONE,
                )?;
                continue;
            };
            let packet = &mut frame[virtio::LEN..len];
            let Ok(Packet::Tcp(segment)) = packet::parse(packet) else {
                continue;
            };
            let (at, ends) = (segment.tcp_at(), segment.tuple);
            let is_clients = (first..=last).contains(&ends.dport);
            let (number, added) = match is_clients == of_clients {
                true => (at + 4, added),
                false => (at + 8, added.wrapping_neg()),
            };
            let number = &mut packet[number..][..4];
            let said = u32::from_be_bytes(number.try_into()?);
            number.copy_from_slice(&said.wrapping_add(added).to_be_bytes());
            readdress::segment(packet, at, &ends);
            tun.send(&frame[..len])?;
        }
    })?;
    Ok(())
}

/// Answers connections to this port in place of the server behind `wan0`, as routers do against floods of SYNs.
fn synproxy(router: &Host, port: u16) -> Result<()> {
    router.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0")?;
    router.shell(&format!(
        "nft add table ip syns\n\
         nft 'add chain ip syns pre {{ type filter hook prerouting priority -300; }}'\n\
         nft 'add rule ip syns pre iifname lan0 tcp dport {port} tcp flags & (fin|syn|rst|ack) == syn notrack'\n\
         nft 'add chain ip syns forward {{ type filter hook forward priority 0; }}'\n\
         nft add rule ip syns forward tcp dport {port} ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm\n\
         nft add rule ip syns forward ct state invalid drop"
    ))?;
    Ok(())
}

/// Connection through SYNPROXY that carries something. Beside much other work some do not, without any daemon on the hosts: the proxy
/// asks the server once.
fn proxied(net: &Routed) -> Result<(TcpStream, TcpStream)> {
    const SOON: Duration = Duration::from_secs(10);
    for _ in 0..5 {
        let Ok(mut conn) = net.connect(7000) else {
            continue;
        };
        let patience = conn.1.read_timeout()?;
        conn.1.set_read_timeout(Some(SOON))?;
        if exchange(&mut conn, FEW).is_ok() {
            conn.1.set_read_timeout(patience)?;
            return Ok(conn);
        }
    }
    bail!("SYNPROXY carries nothing")
}

/// Without a comparison the connection hung for ever, and `enable` said that it had moved.
#[test]
fn a_connection_that_a_firewall_renumbers_goes_on_in_plain() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            renumber(&net.router, [7000, 7001], true, FAR)?;
            for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                let mut conn = net.connect(7000)?;
                exchange(&mut conn, FEW)?;
                let said = node.refused(&["enable", end, "7000"])?;
                ensure!(said.contains("changes TCP's sequence numbers"), "{said}");
                exchange(&mut conn, FEW)?;
                for node in [&net.a, &net.b] {
                    node.wait_bump(7000, "plain")?;
                }
            }
            // A rule takes it again and again otherwise.
            let mut conn = net.connect(7001)?;
            exchange(&mut conn, FEW)?;
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "seal"])?;
            exchange(&mut conn, FEW)?;
            for node in [&net.a, &net.b] {
                node.wait_bump(7001, "plain")?;
            }
            exchange(&mut conn, FEW)
        })
    });
}

/// A window may reach as far as these numbers are moved: that they differ is seen once TCP has sent again what the other kernel does not
/// take, by the end that it comes to. The other one takes its word.
#[test]
fn a_connection_that_a_firewall_renumbers_by_little_goes_on_in_plain() {
    const LITTLE: u32 = 1 << 21;
    const WITHIN: Duration = Duration::from_secs(10);
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            let ways = [
                (7000, true, LITTLE),
                (7001, true, LITTLE.wrapping_neg()),
                (7002, false, LITTLE),
                (7003, false, LITTLE.wrapping_neg()),
            ];
            for (port, of_clients, added) in ways {
                renumber(&net.router, [port, port], of_clients, added)?;
            }
            for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                let conns = ways.into_iter().map(|(port, ..)| net.connect(port));
                let mut conns = conns.collect::<Result<Vec<_>>>()?;
                for conn in &mut conns {
                    exchange(conn, FEW)?;
                }
                let rules = ways.map(|(port, ..)| port.to_string());
                let rules = rules.each_ref().map(|port| {
                    let made = node.ctl(&["rule", "add", end, port, "--bump", "seal"])?;
                    anyhow::Ok(made["id"].to_string())
                });
                thread::scope(|scope| {
                    let exchange = |conn| {
                        let moved = Instant::now();
                        exchange(conn, FEW).map(|()| moved.elapsed())
                    };
                    let each = conns.iter_mut();
                    let each = each.map(|conn| scope.spawn(move || exchange(conn)));
                    for (way, done) in ways.into_iter().zip(each.collect::<Vec<_>>()) {
                        let took = done.join().expect("an exchange does not panic")?;
                        ensure!(took < WITHIN, "{end} {way:?}: it stood for {took:?}");
                    }
                    Ok(())
                })?;
                for (conn, (port, ..)) in conns.iter_mut().zip(ways) {
                    for node in [&net.a, &net.b] {
                        node.wait_bump(port, "plain")?;
                    }
                    exchange(conn, FEW)?;
                }
                for id in rules {
                    node.ctl(&["rule", "del", &id?])?;
                }
            }
            Ok(())
        })
    });
}

/// The router answers the laptop before it asks the server, and so chooses the numbers that the laptop takes for the server's.
#[test]
fn a_connection_that_a_router_translates_and_renumbers_is_refused_and_unharmed() {
    isolated(|| {
        Homes::run(|net| {
            synproxy(&net.homes[0], 7000)?;
            let mut conn = net.connect(0, 40_000, 7000)?;
            exchange(&mut conn, FEW)?;
            let laptop = &net.laptops[0];
            for _ in 0..2 {
                let said = laptop.refused(&["enable", "--dport", "7000", "--bump", "seal"])?;
                ensure!(said.contains("changes its sequence numbers"), "{said}");
                ensure!(laptop.bumps(7000)? == ["plain"]);
                exchange(&mut conn, FEW)?;
            }
            laptop.ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
            exchange(&mut conn, FEW)?;
            laptop.wait_bump(7000, "plain")?;
            exchange(&mut conn, FEW)
        })
    });
}

/// A kernel that answered strange numbers a moment before says nothing for half a second, and one of sixteen connections has numbers
/// that a long window reaches. `enable` said that such a connection had moved, and it stood still on its bump for ever.
#[test]
fn a_connection_through_synproxy_on_a_router_goes_on_in_plain() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            synproxy(&net.router, 7000)?;
            net.router.shell("nft flush table ip fw")?;
            let mut refused = 0;
            for (node, end) in [(&net.a, "--sport"), (&net.b, "--dport")].repeat(3) {
                let mut conn = proxied(net)?;
                // One before it may not have ended.
                let port = conn.0.local_addr()?.port().to_string();
                // What is at rest, and says nothing a second time, is found as soon as it sends.
                for _ in 0..2 {
                    if let Ok(said) = node.refused(&["enable", end, &port]) {
                        ensure!(said.contains("changes TCP's sequence numbers"), "{said}");
                        refused += 1;
                    }
                    exchange(&mut conn, FEW)?;
                    for node in [&net.a, &net.b] {
                        node.wait_bump(7000, "plain")?;
                    }
                }
            }
            ensure!(refused > 6, "{refused} of 12 were refused");
            Ok(())
        })
    });
}

/// Both daemons find the connections in plain as they start, and each has a rule for them: for one bump, or for one of its own. Neither
/// host follows the other one to plain for its rule, unless it has seen as well that no bump carries the connection.
#[test]
fn a_connection_that_a_firewall_renumbers_goes_on_in_plain_where_both_hosts_have_rules() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            renumber(&net.router, [7000, 7001], true, FAR)?;
            let mut conns = [net.connect(7000)?, net.connect(7001)?];
            for conn in &mut conns {
                exchange(conn, FEW)?;
            }
            let rule = |end: &str, port: u16, bump: &str| {
                format!("[[rule]]\nbump = \"{bump}\"\n{end} = {port}\n")
            };
            for (node, end, bumps) in [
                (&mut net.a, "dport", ["seal", "seal"]),
                (&mut net.b, "sport", ["seal", "scramble"]),
            ] {
                node.stop(Signal::SIGTERM)?;
                let rules = [7000, 7001].into_iter().zip(bumps);
                let rules = rules.map(|(port, bump)| rule(end, port, bump));
                node.configure_more(&rules.collect::<String>())?;
            }
            net.a.start()?;
            net.b.start()?;
            for (conn, port) in conns.iter_mut().zip([7000, 7001]) {
                exchange(conn, FEW).with_context(|| port.to_string())?;
                for node in [&net.a, &net.b] {
                    node.wait_bump(port, "plain")?;
                }
                exchange(conn, FEW)?;
            }
            Ok(())
        })
    });
}
