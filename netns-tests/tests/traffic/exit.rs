//! The Internet behind a server: connections to anywhere leave a household by bumps over both its uplinks, and go on in the
//! server's name.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::Host;
use netns_tests::daemon::wait;
use netns_tests::household::{Ears, Households, Rounds, web, web_v6};
use netns_tests::routed::exchange;
use netns_tests::ssh::Session;
use netns_tests::traffic::{SETTLED, Talk, connect, connect_from};
use netns_tests::{Node, browser, docker, isolated, isolated_with_users};
use nix::sys::signal::Signal;
use socket2::{Domain, SockRef, Socket, Type};

const ALL: [&str; 5] = ["rule", "add", "--all", "--bump", "seal"];

/// True if a host connects to there within a time that is short for a network without losses.
fn reaches(from: &Host, to: SocketAddr) -> bool {
    from.in_ns(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None);
        let connected =
            socket.map(|socket| socket.connect_timeout(&to.into(), Duration::from_secs(2)));
        matches!(connected, Ok(Ok(())))
    })
}

/// True if UDP from a host arrives at another, false if it is answered with an error.
fn asks(from: &Host, to: &Host, at: SocketAddr) -> Result<bool> {
    let here = to.in_ns(|| UdpSocket::bind(at))?;
    let asking = from.in_ns(|| -> io::Result<UdpSocket> {
        let any = SocketAddr::new(
            if at.is_ipv4() {
                [0; 4].into()
            } else {
                [0; 16].into()
            },
            0,
        );
        let socket = UdpSocket::bind(any)?;
        socket.connect(at)?;
        Ok(socket)
    })?;
    [&here, &asking]
        .into_iter()
        .try_for_each(|socket| socket.set_nonblocking(true))?;
    let refused = |said: io::Result<usize>| {
        // Of what this host sends itself the kernel says so at once.
        let refusals = [
            io::ErrorKind::ConnectionRefused,
            io::ErrorKind::PermissionDenied,
        ];
        said.is_err_and(|error| refusals.contains(&error.kind()))
    };
    if refused(asking.send(b"QUIC?")) {
        return Ok(false);
    }
    let mut answer = None;
    wait("what becomes of UDP", || {
        answer = match (here.recv(&mut [0; 8]), refused(asking.recv(&mut [0; 8]))) {
            (Ok(_), _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        answer.is_some()
    })?;
    Ok(answer == Some(true))
}

/// No end knows of the bump: segments are as long as the ends say, whatever the datagrams take, and ICMP errors of the far
/// Internet arrive.
fn sizes_and_errors(net: &Households, from: &Host, to: SocketAddr, longest: u32) -> Result<()> {
    let conn = net.connect(from, 0, to)?;
    let far = conn.1.try_clone()?;
    let talk = Talk::over(from, &net.web, conn)?;
    talk.advance(SETTLED)?;
    let found = SockRef::from(&far).tcp_mss()?;
    ensure!(found == longest, "{found} bytes in a segment to {to}");
    net.internet.run("ip link set web0 mtu 1400")?;
    talk.advance(SETTLED)?;
    net.internet.run("ip link set web0 mtu 1500")?;
    talk.finish()?;
    let (family, nobody, kind) = match to.is_ipv4() {
        true => (
            "-4",
            SocketAddr::from(([192, 0, 2, 99], 443)),
            io::ErrorKind::HostUnreachable,
        ),
        false => (
            "-6",
            "[2001:db8:80::99]:443".parse()?,
            io::ErrorKind::NetworkUnreachable,
        ),
    };
    net.internet.run(&format!(
        "ip {family} route add unreachable {}",
        nobody.ip()
    ))?;
    let error = from.in_ns(|| TcpStream::connect(nobody)).err();
    ensure!(
        error.as_ref().map(io::Error::kind) == Some(kind),
        "{nobody}: {error:?}"
    );
    Ok(())
}

#[test]
fn a_laptop_has_the_internet_by_a_server_over_both_uplinks() {
    isolated(|| {
        Households::run(1, |net| {
            // In plain it is known by another address, and stays what it is.
            let host = net.homes[0].node.host.clone();
            let mut before = net.connect(&host, 0, web(8000))?;
            exchange(&mut before, 100_000)?;
            net.homes[0].node.ctl(&ALL)?;
            exchange(&mut before, 100_000)?;
            drop(before);
            let ears = Ears::new(&net.homes[0])?;
            let talks = [
                net.talk(&host, 0, web(443))?,
                net.talk(&host, 0, web_v6(443))?,
            ];
            let advance = |bytes: u64| talks.iter().try_for_each(|talk: &Talk| talk.advance(bytes));
            advance(SETTLED)?;
            for bump in ["scramble", "seal"] {
                net.homes[0].node.put_on(bump, "--dport", 443)?;
                net.homes[0].node.wait_bump(443, bump)?;
                net.b.wait_bump(443, bump)?;
                advance(SETTLED)?;
            }
            net.homes[0].node.wait_locked(443)?;
            // A captive portal, or a plan that is used up.
            let (node, router) = (&net.homes[0].node, &net.homes[0].uplinks[1]);
            router.shell(
                "nft add table ip portal\n\
                 nft 'add chain ip portal out { type filter hook forward priority 0; }'\n\
                 nft 'add rule ip portal out meta l4proto udp drop'",
            )?;
            wait("the uplink without Internet to be seen", || {
                let said = node.path("lte").map(|path| path["reason"].to_string());
                said.is_ok_and(|said| said.contains("no Internet there"))
            })?;
            advance(SETTLED)?;
            router.run("nft delete table ip portal")?;
            node.wait_path("lte", "up")?;
            for (node, end) in [(&net.homes[0].node, "--dport"), (&net.b, "--sport")] {
                let said = node.refused(&["disable", end, "443"])?;
                ensure!(said.contains("would have another address"), "{said}");
                advance(SETTLED)?;
            }
            for _ in 0..2 {
                let node = &mut net.homes[0].node;
                node.stop(Signal::SIGKILL)?;
                node.start()?;
                advance(SETTLED)?;
                net.b.stop(Signal::SIGKILL)?;
                net.b.start()?;
                advance(SETTLED)?;
            }
            // Such as begins while the other end is new.
            net.talk(&host, 0, web(80))?.finish()?;
            let device = &net.homes[0].devices[0];
            sizes_and_errors(net, &host, web_v6(444), 1428)?;
            sizes_and_errors(net, device, web(444), 1448)?;
            ears.heard_no_tcp(100)?;
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn a_server_lets_nobody_into_its_own_networks() {
    isolated(|| {
        Households::run(1, |net| {
            let home = &net.homes[0];
            home.node.ctl(&ALL)?;
            let server = Ipv4Addr::new(203, 0, 113, 7);
            // What the server lets peers open without an exit.
            let allowed = SocketAddr::from((server, 2222));
            exchange(&mut connect(&home.node.host, &net.b.host, allowed)?, 1000)?;
            let listening = |host: &Host, at: &str| -> Result<std::net::TcpListener> {
                host.in_ns(|| Ok(std::net::TcpListener::bind(at)?))
            };
            let _held = [
                listening(&net.secret, "0.0.0.0:80")?,
                listening(&net.b.host, "0.0.0.0:8022")?,
            ];
            ensure!(
                reaches(&net.b.host, "10.8.0.10:80".parse()?),
                "not even from the server"
            );
            for to in ["10.8.0.10:80", "10.8.0.1:8022"] {
                let from = [&home.node.host, &home.devices[0]];
                for from in from {
                    ensure!(!reaches(from, to.parse()?), "{} reached {to}", from.name());
                }
            }
            ensure!(net.b.counter("inner_address_refused")? > 0);
            // Docker forwards for nobody but its containers.
            let _web = listening(&net.web, "0.0.0.0:80")?;
            ensure!(reaches(&home.node.host, web(80)), "not even without Docker");
            docker::guard(&net.b.host)?;
            ensure!(!reaches(&home.node.host, web(80)), "Docker lets it through");
            let said = net.b.diagnosis("firewall")?;
            for option in ["-i dibs+", "-o dibs+"] {
                ensure!(
                    said.contains(&format!("iptables -I FORWARD {option} -p tcp -j ACCEPT")),
                    "{said}"
                );
                net.b
                    .host
                    .run(&format!("iptables -I FORWARD {option} -j ACCEPT"))?;
            }
            ensure!(reaches(&home.node.host, web(80)), "after what doctor says");
            ensure!(
                !reaches(&home.node.host, "10.8.0.10:80".parse()?),
                "the server's own networks are open"
            );
            Ok(())
        })
    });
}

/// Neither an uplink nor an interface without a network is one that devices are behind.
fn refuses_uplinks(node: &Node) -> Result<()> {
    for (interface, why) in [("dsl", "so it is a path"), ("port1", "has no address")] {
        let wishes = [
            "init",
            "--config",
            "/run/dibs/dibsd.toml",
            "--gateway",
            interface,
        ];
        let said = node.refused(&wishes)?;
        ensure!(said.contains(why), "{said}");
    }
    Ok(())
}

/// The server's line is all that a household takes. It works once and for an hour, and nobody's connections break as another
/// household joins or is removed.
#[test]
fn households_join_by_one_line_each() {
    isolated(|| {
        Households::run(2, |net| {
            let homes = net.homes.iter_mut().map(|home| &mut home.node);
            for node in homes.chain([&mut net.b]) {
                node.stop(Signal::SIGTERM)?;
                for file in ["dibsd.toml", "private.key"] {
                    std::fs::remove_file(node.directory().join(file))?;
                }
            }
            let [a, c] = &mut net.homes[..] else {
                anyhow::bail!("two households");
            };
            let (host, c) = (a.node.host.clone(), &mut c.node);
            // With an address of the Internet it would not be behind NAT.
            host.run("ip address del 2001:db8:1::2/64 dev dsl")?;
            refuses_uplinks(&a.node)?;
            let wishes = |line: &str| ["--gateway", "lan0", "--join", line].map(str::to_owned);
            let join = |node: &Node, line: &str| {
                let wishes = wishes(line);
                node.init(&wishes.each_ref().map(String::as_str)).map(drop)
            };
            let first = net.b.init(&["--exit", "--untrusted", "wan0"])?;
            net.b.start()?;
            join(&a.node, &first)?;
            a.node.start()?;
            a.node.wait_until_joined(2)?;
            // The token is of no use any more at either end.
            ensure!(!a.node.directory().join("lib/token").exists());
            join(c, &first)?;
            c.start()?;
            let refused = |net: &Node| net.counter("join_token_refused");
            wait("a used token", || {
                refused(&net.b).is_ok_and(|count| count > 0)
            })?;
            let peers = c.ctl(&["peer", "list"])?;
            let reason = peers[0]["reason"].as_str().unwrap_or_default();
            ensure!(reason.contains("used up or older than an hour"), "{peers}");

            // An hour later.
            let second = net.b.init(&["--exit"])?;
            let tokens = net.b.directory().join("lib/tokens");
            for token in std::fs::read_dir(tokens)? {
                std::fs::write(token?.path(), "1")?;
            }
            let before = refused(&net.b)?;
            c.stop(Signal::SIGTERM)?;
            std::fs::remove_file(c.directory().join("dibsd.toml"))?;
            join(c, &second)?;
            c.start()?;
            wait("a token that is void", || {
                refused(&net.b).is_ok_and(|count| count > before)
            })?;

            let ears = Ears::new(a)?;
            let device = &a.devices[0];
            let conn = connect_from(0, device, &net.web, web(443))?;
            let talk = Talk::over(device, &net.web, conn)?;
            talk.advance(SETTLED)?;
            let third = net.b.init(&["--exit"])?;
            c.stop(Signal::SIGTERM)?;
            std::fs::remove_file(c.directory().join("dibsd.toml"))?;
            join(c, &third)?;
            c.start()?;
            c.wait_until_joined(2)?;
            talk.advance(SETTLED)?;
            // They are in no file of the user's, and outlive the daemon.
            net.b.stop(Signal::SIGKILL)?;
            net.b.start()?;
            talk.advance(SETTLED)?;
            ears.heard_no_tcp(100)?;
            c.wait_until_joined(2)?;
            let peers = net.b.ctl(&["peer", "list"])?;
            let lent: Vec<_> = peers
                .as_array()
                .into_iter()
                .flatten()
                .map(|peer| &peer["addresses"])
                .collect();
            ensure!(lent.len() == 2 && lent[0] != lent[1], "{peers}");

            let name = { peers.as_array().into_iter().flatten() }
                .find(|peer| peer["addresses"][0] == "10.77.0.2/32")
                .and_then(|peer| peer["name"].as_str());
            let name = name.context("the first household")?;
            let refused = net.b.refused(&["peer", "remove", name])?;
            ensure!(refused.contains("may break"), "{refused}");
            talk.finish()?;
            net.b.ctl(&["peer", "remove", name, "--force"])?;
            wait("the server without a peer", || {
                let peers = net.b.ctl(&["peer", "list"]);
                peers.is_ok_and(|peers| peers.as_array().is_some_and(|left| left.len() == 1))
            })?;
            let _held = net.web.in_ns(|| std::net::TcpListener::bind(web(443)))?;
            // What it still asks for waits, and does not leave by itself.
            ensure!(!reaches(&host, web(443)), "a peer that was removed");
            c.wait_until_joined(2)?;
            ensure!(reaches(&c.host, web(443)), "the other peer");
            c.ctl(&["leave", "--config", "/run/dibs/dibsd.toml", "--force"])?;
            for file in ["dibsd.toml", "private.key"] {
                ensure!(!c.directory().join(file).exists(), "{file} is there");
            }
            c.stop(Signal::SIGTERM)?;
            ensure!(reaches(&c.host, web(443)), "the Internet by itself");
            Ok(())
        })
    });
}

/// A bank, say, that takes nobody from a server's address.
#[test]
fn a_direct_rule_lets_out_what_must_not_go_by_the_server() {
    isolated(|| {
        Households::run(1, |net| {
            let home = &net.homes[0];
            let [own, device, other] = [&home.node.host, &home.devices[0], &home.devices[1]];
            ensure!(asks(device, &net.web, web(443))?, "without a rule");
            home.node.ctl(&ALL)?;
            // With `refuse_quic`.
            let refused = [(own, web(443)), (own, web_v6(443)), (device, web(443))];
            for (from, to) in refused {
                ensure!(
                    !asks(from, &net.web, to)?,
                    "{} reached {to} by UDP",
                    from.name()
                );
            }
            let router = &home.uplinks[0];
            for from in [own, device] {
                ensure!(asks(from, &net.web, web(444))?, "another port");
                ensure!(
                    asks(from, router, "192.168.178.1:443".parse()?)?,
                    "a local network"
                );
            }
            let out = [
                "rule",
                "add",
                "--src",
                "192.168.1.12",
                "--bump",
                "direct",
                "--priority",
                "1",
            ];
            let made = home.node.ctl(&out)?;
            ensure!(
                asks(other, &net.web, web(443))?,
                "a device that leaves directly"
            );
            ensure!(!asks(device, &net.web, web(443))?, "another device");
            home.node.ctl(&["rule", "del", &made["id"].to_string()])?;
            ensure!(home.node.counter("quic_refused")? > 0);

            let on = net.talk(&home.devices[0], 0, web(8443))?;
            let direct = [
                "rule",
                "add",
                "--dport",
                "8443",
                "--bump",
                "direct",
                "--priority",
                "1",
            ];
            let made = home.node.ctl(&direct)?;
            let said = home.node.refused(&[&direct[..], &["--prefer"]].concat())?;
            ensure!(said.contains("leave directly"), "{said}");
            for from in [&home.node.host, &home.devices[1]] {
                let mut conn = net.connect(from, 0, web(8443))?;
                let seen = conn.1.peer_addr()?.ip();
                ensure!(
                    seen.to_string().starts_with("198.51.100."),
                    "{seen} is at web"
                );
                exchange(&mut conn, 100_000)?;
                net.talk(from, 0, web(443))?.finish()?;
            }
            // It began by the server.
            on.advance(SETTLED)?;
            home.node.wait_bump(8443, "seal")?;
            home.node.ctl(&["rule", "del", &made["id"].to_string()])?;
            on.advance(SETTLED)?;
            net.talk(&home.devices[1], 0, web(8443))?.finish()?;
            on.finish()
        })
    });
}

/// Devices use one port at once, and so do two households.
#[test]
fn households_with_the_same_network_have_a_server_at_once() {
    isolated(|| {
        Households::run(2, |net| {
            for home in &net.homes {
                home.node.ctl(&ALL)?;
            }
            let ears = net
                .homes
                .iter()
                .map(Ears::new)
                .collect::<Result<Vec<_>>>()?;
            let mut talks = Vec::new();
            for (number, home) in (0u16..).zip(&net.homes) {
                for (at, device) in (0u16..).zip(&home.devices) {
                    // Two devices of a household call one port.
                    talks.push(net.talk(device, 40_000, web(7000 + 10 * number + at / 2))?);
                }
            }
            let advance = |bytes: u64| talks.iter().try_for_each(|talk: &Talk| talk.advance(bytes));
            advance(SETTLED)?;
            net.homes[0].node.put_on("scramble", "--dport", 7000)?;
            net.homes[0].node.wait_bump(7000, "scramble")?;
            advance(SETTLED)?;
            net.homes[1].node.stop(Signal::SIGKILL)?;
            net.homes[1].node.start()?;
            advance(SETTLED)?;
            ears.into_iter()
                .try_for_each(|ears| ears.heard_no_tcp(100))?;
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

/// Closed by state: a rule that prefers its bump opens the ordinary route while the server is away, and no other does.
#[test]
fn what_begins_while_the_server_is_away_waits_or_leaves_directly() {
    isolated(|| {
        Households::run(1, |net| {
            let host = net.homes[0].node.host.clone();
            net.homes[0].node.ctl(&ALL)?;
            net.homes[0].node.ctl(&[
                "rule",
                "add",
                "--dport",
                "80",
                "--bump",
                "seal",
                "--prefer",
                "--priority",
                "1",
            ])?;
            let talk = net.talk(&host, 0, web(443))?;
            talk.advance(SETTLED)?;
            net.b.stop(Signal::SIGKILL)?;
            let node = &net.homes[0].node;
            wait("the server to be away", || {
                let peers = node.ctl(&["peer", "list"]).unwrap_or_default();
                peers[0]["state"] != "established"
            })?;
            let ears = Ears::new(&net.homes[0])?;
            let held = net.web.in_ns(|| std::net::TcpListener::bind(web(22)))?;
            ensure!(!reaches(&host, web(22)), "without the server");
            ears.heard_no_tcp(0)?;
            drop(held);
            let mut direct = net.connect(&host, 0, web(80))?;
            let seen = direct.1.peer_addr()?.ip();
            ensure!(
                seen.to_string().starts_with("198.51.100."),
                "{seen} is at web"
            );
            exchange(&mut direct, 100_000)?;
            net.b.start()?;
            net.homes[0].node.wait_until_joined(2)?;
            talk.advance(SETTLED)?;
            exchange(&mut direct, 100_000)?;
            net.talk(&host, 0, web(80))?.finish()?;
            exchange(&mut direct, 100_000)?;
            talk.finish()
        })
    });
}

/// The gateway's kernel answers nothing to devices while its daemon is away, so their calls come again.
#[test]
fn what_begins_while_the_gateways_daemon_is_away_waits() {
    isolated(|| {
        Households::run(1, |net| {
            let device = net.homes[0].devices[0].clone();
            let _listens = net.web.in_ns(|| std::net::TcpListener::bind(web(22)))?;
            net.homes[0].node.ctl(&ALL)?;
            ensure!(reaches(&device, web(22)), "before");
            net.homes[0].node.stop(Signal::SIGKILL)?;
            let called = device
                .in_ns(|| TcpStream::connect_timeout(&web(22), Duration::from_secs(2)).map(drop));
            let kind = called.map_err(|error| error.kind());
            ensure!(kind == Err(io::ErrorKind::TimedOut), "{kind:?}");
            net.homes[0].node.start()?;
            net.homes[0].node.wait_until_joined(2)?;
            ensure!(reaches(&device, web(22)), "afterwards");
            Ok(())
        })
    });
}

/// Entries of connections that ended expire while the server's daemon is away, or has just looked. Made again, they would stand in the
/// way of later connections of the same ports for days.
#[test]
fn what_ended_is_not_tracked_again_by_a_daemon_that_starts() {
    isolated(|| {
        Households::run(1, |net| {
            net.b
                .host
                .run("sysctl -q net.netfilter.nf_conntrack_tcp_timeout_time_wait=4")?;
            net.homes[0].node.ctl(&ALL)?;
            let device = net.homes[0].devices[0].clone();
            for _ in 0..3 {
                // One expires at each moment of the next restart.
                let began = Instant::now();
                while began.elapsed() < Duration::from_secs(3) {
                    exchange(&mut net.connect(&device, 0, web(443))?, 1000)?;
                }
                net.b.stop(Signal::SIGKILL)?;
                net.b.start()?;
                net.homes[0].node.wait_until_joined(2)?;
            }
            wait("an end to all that is tracked", || {
                let listed = net.b.host.run("conntrack -L -p tcp");
                listed.is_ok_and(|text| !text.contains("port=443"))
            })?;
            exchange(&mut net.connect(&device, 0, web(443))?, 1000)
        })
    });
}

/// Connections of devices on which nobody says anything while the server's daemon is away, two of them from one port, go on by the
/// first word of either end.
#[test]
fn idle_connections_outlive_the_servers_daemon_by_the_word_of_either_end() {
    isolated(|| {
        Households::run(1, |net| {
            net.homes[0].node.ctl(&ALL)?;
            let devices = net.homes[0].devices.clone();
            let mut pairs = Vec::new();
            for round in 0..4 {
                let port = 40_000 + round;
                for device in &devices {
                    pairs.push(net.connect(device, port, web(443))?);
                }
            }
            for pair in &mut pairs {
                exchange(pair, 1000)?;
            }
            for round in 0..4_usize {
                net.b.stop(Signal::SIGKILL)?;
                net.b.start()?;
                net.homes[0].node.wait_until_joined(2)?;
                // Each comes first once.
                pairs.rotate_left(1);
                for (at, pair) in pairs.iter_mut().enumerate() {
                    let said = match (at + round) % 2 {
                        0 => exchange(pair, 1000),
                        _ => {
                            let (near, far) = pair;
                            far.write_all(&[7; 1000])?;
                            near.read_exact(&mut [0; 1000])
                                .context("what web says first")
                        }
                    };
                    said.with_context(|| format!("connection {at} after kill {round}"))?;
                }
            }
            Ok(())
        })
    });
}

/// Uplinks swallow everything in turn, and then both at once.
#[test]
fn uplinks_fail_under_hundreds_of_connections() {
    isolated_with_users(|| {
        Households::run(1, |net| {
            let home = &net.homes[0];
            home.node.ctl(&ALL)?;
            let rounds = Rounds::start(net, &home.devices[0], 200)?;
            let talk = net.talk(&home.devices[1], 0, web(443))?;
            let mut session = Session::start(&home.devices[2], &net.web, "192.0.2.80")?;
            for uplinks in [&["dsl"][..], &["lte"], &["dsl", "lte"]] {
                let routers = || {
                    let all = ["dsl", "lte"].into_iter().zip(&home.uplinks);
                    all.filter(|(name, _)| uplinks.contains(name))
                };
                for (_, router) in routers() {
                    router.shell(
                        "nft add table inet cut\n\
                         nft 'add chain inet cut out { type filter hook forward priority 0; policy drop; }'",
                    )?;
                }
                for name in uplinks {
                    home.node.wait_path(name, "down")?;
                }
                session.press()?;
                if uplinks.len() == 1 {
                    session.echoes()?;
                    rounds.go_on()?;
                    talk.advance(SETTLED)?;
                }
                for (_, router) in routers() {
                    router.run("nft delete table inet cut")?;
                }
                session.echoes()?;
                rounds.go_on()?;
                talk.advance(SETTLED)?;
                for name in uplinks {
                    home.node.wait_path(name, "up")?;
                }
            }
            rounds.finish()?;
            talk.finish()
        })
    });
}

/// All objects arrive with TLS and HTTP/2, by both uplinks, and none in plain TCP.
#[test]
fn a_browser_on_a_device_loads_a_page_over_both_uplinks() {
    isolated(|| {
        Households::run(1, |net| {
            let home = &net.homes[0];
            home.node.ctl(&ALL)?;
            let _server = browser::serve(&net.web)?;
            let ears = Ears::new(home)?;
            browser::browse(&home.devices[0], "192.0.2.80")?;
            ears.heard_no_tcp(20)
        })
    });
}
