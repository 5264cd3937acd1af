//! Hosts that forward for the networks behind them: connections between those go in and out of bumps, and
//! nothing else comes by them.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use dibs_lab::baseline::openvpn;
use netns_tests::attacker::{Attacker, Segment, numbers};
use netns_tests::daemon::wait;
use netns_tests::topology::{behind, behind_v6, server};
use netns_tests::traffic::{SETTLED, Talk, abort, connect, connect_from, ping};
use netns_tests::{Net, Node, Setup, isolated, kernel};
use nix::sys::signal::Signal;

const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// On the bump by now: nothing of it is heard, and both ways move.
pub(super) fn unheard(net: &Net, talk: &Talk) -> Result<()> {
    talk.advance(SETTLED)?;
    let ears = net.eavesdrop()?;
    talk.advance(SETTLED)?;
    ears.heard_nothing(&talk.plaintexts, SETTLED as usize)
}

/// In plain by now, by the untrusted link.
pub(super) fn heard(net: &Net, talk: &Talk) -> Result<()> {
    talk.advance(SETTLED)?;
    let ears = net.eavesdrop()?;
    talk.advance(256 << 10)?;
    let always = SystemTime::UNIX_EPOCH..SystemTime::now();
    let plain = ears.finish()?.plain(&talk.plaintexts, &always);
    ensure!(plain[0] == 0 && plain[1] > 0, "in plain: {plain:?}");
    Ok(())
}

/// `top` shows the device behind the gateway, and what each path carries of its traffic.
fn of_device(net: &Net) -> Result<()> {
    let seen = net.a.ctl(&["top", "--interval", "0.5"])?;
    let device = &seen["devices"][0];
    let address = device["address"].as_str().unwrap_or_default();
    ensure!(
        ["192.168.7.10", "fd00:7::10"].contains(&address),
        "{seen:#}"
    );
    let rates = device["path_rates"].as_object().context("path_rates")?;
    let mut rates = rates.values().filter_map(serde_json::Value::as_f64);
    ensure!(rates.any(|rate| rate > 1e4), "{seen:#}");
    Ok(())
}

#[test]
fn a_rule_moves_a_connection_that_passes_and_the_far_gateway_follows() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for server in [behind(7000), behind_v6(7001)] {
                let port = server.port();
                let talk = Talk::start(&net.behind[0], &net.behind[1], server)?;
                heard(net, &talk)?;
                let dport = port.to_string();
                let rule = ["rule", "add", "--dport", &dport, "--bump", "seal"];
                let made = net.a.ctl(&rule)?;
                net.wait_bump(port, "seal")?;
                unheard(net, &talk)?;
                net.wait_locked(port)?;
                of_device(net)?;
                // What begins now is on it from its first packet on.
                let ears = net.eavesdrop()?;
                let late = Talk::start(&net.behind[0], &net.behind[1], server)?;
                late.advance(SETTLED)?;
                ears.heard_nothing(&late.plaintexts, SETTLED as usize)?;
                late.finish()?;
                net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
                net.wait_bump(port, "plain")?;
                heard(net, &talk)?;
                talk.finish()?;
            }
            Ok(())
        })
    });
}

#[test]
fn either_gateway_moves_a_connection_that_either_side_began() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let [near, far] = [&net.behind[0], &net.behind[1]];
            let of_near = SocketAddr::from(([192, 168, 7, 10], 7001));
            let talks = [
                Talk::start(near, far, behind(7000))?,
                Talk::start(far, near, of_near)?,
            ];
            for talk in &talks {
                talk.advance(256 << 10)?;
            }
            for (bump, by, back) in [("scramble", &net.a, &net.b), ("seal", &net.b, &net.a)] {
                for (talk, port, server) in [(&talks[0], 7000, &net.b), (&talks[1], 7001, &net.a)] {
                    let end = |node: &Node| match node.host.name() == server.host.name() {
                        true => "--sport",
                        false => "--dport",
                    };
                    by.put_on(bump, end(by), port)?;
                    net.wait_bump(port, bump)?;
                    unheard(net, talk)?;
                    back.put_on("plain", end(back), port)?;
                    net.wait_bump(port, "plain")?;
                    heard(net, talk)?;
                }
            }
            let listed = net.a.ctl(&["conn", "list"])?;
            let listed = listed.as_array().context("a list")?;
            ensure!(listed.len() == 2, "{listed:#?}");
            for conn in listed {
                ensure!(
                    conn["uid"].is_null() && conn["process"].is_null(),
                    "{conn:#}"
                );
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn nothing_of_it_is_plain_while_a_daemon_is_away() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let talk = net.talk_behind(7000)?;
            talk.advance(256 << 10)?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_locked(7000)?;
            talk.advance(SETTLED)?;
            let ears = net.eavesdrop()?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                net.a.stop(signal)?;
                // Even if somebody empties the firewall, and what it knows of connections.
                for flush in ["iptables -t mangle -F", "iptables -F", "conntrack -F"] {
                    net.a.host.run(flush)?;
                }
                talk.stands_still(Duration::from_secs(1))?;
                net.a.start()?;
                net.wait_established()?;
                talk.advance(SETTLED)?;
                net.b.stop(signal)?;
                talk.stands_still(Duration::from_secs(1))?;
                net.b.start()?;
                net.wait_established()?;
                talk.advance(SETTLED)?;
            }
            net.wait_bump(7000, "seal")?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            net.wait_locked(7000)?;
            // Which is what cleanup is for.
            net.a.ctl(&["cleanup"])?;
            net.wait_bump(7000, "plain")?;
            heard(net, &talk)?;
            let marked = kernel::marked(&net.a.host)?;
            ensure!(marked.is_empty(), "{marked:#?}");
            talk.finish()
        })
    });
}

#[test]
fn what_is_required_is_never_plain() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000\nrequire = true";
        Setup::new()
            .gateways()
            .rule(rule)
            .without_daemons()
            .run(|net| {
                let ears = net.eavesdrop()?;
                net.a.start()?;
                // No session yet: nothing leaves at all.
                let early = net.behind[0].in_ns(|| {
                    TcpStream::connect_timeout(&behind(7000), Duration::from_secs(1)).map(drop)
                });
                ensure!(early.is_err(), "connected without a session");
                net.b.start()?;
                net.wait_established()?;
                let talk = net.talk_behind(7000)?;
                talk.advance(1 << 20)?;
                let said = net.a.refused(&["disable", "--dport", "7000"])?;
                ensure!(said.contains("requires seal"), "{said}");
                for chains in ["mangle", "filter"] {
                    net.a.host.run(&format!("iptables -t {chains} -F"))?;
                    talk.advance(256 << 10)?;
                }
                net.a.stop(Signal::SIGKILL)?;
                net.a.host.run("conntrack -F")?;
                talk.stands_still(Duration::from_secs(1))?;
                net.a.start()?;
                net.wait_established()?;
                talk.advance(1 << 20)?;
                let plaintexts = talk.plaintexts;
                talk.finish()?;
                let heard = ears.finish()?;
                heard.no_segment(7000)?;
                let always = SystemTime::UNIX_EPOCH..SystemTime::now();
                ensure!(heard.plain(&plaintexts, &always) == [0, 0], "in plain");
                Ok(())
            })
    });
}

#[test]
fn a_flush_of_what_is_tracked_lets_nothing_out_and_undoes_no_choice() {
    isolated(|| {
        let rule = "bump = \"scramble\"\ndport = [7000, 7001]";
        Setup::new().gateways().rule(rule).run(|net| {
            let talk = net.talk_behind(7000)?;
            let (mut near, mut far) = connect(&net.behind[0], &net.behind[1], behind(7001))?;
            for port in [7000, 7001] {
                net.wait_bump(port, "scramble")?;
                // Above the rule.
                net.a.put_on("seal", "--dport", port)?;
                net.wait_locked(port)?;
            }
            talk.advance(SETTLED)?;
            let ears = net.eavesdrop()?;
            for node in [&net.a, &net.b, &net.a] {
                node.host.run("conntrack -F")?;
                // One that says nothing, too.
                net.wait_bump(7001, "seal")?;
                talk.advance(SETTLED)?;
                net.wait_bump(7000, "seal")?;
            }
            far.write_all(b"words")?;
            let mut words = [0; 5];
            near.read_exact(&mut words)?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            net.wait_locked(7001)?;
            // It is still the connection that was chosen.
            net.b
                .put_on("plain", "--sport", 7001)
                .err()
                .context("a rule wants it on its bump")?;
            net.b.put_on("share", "--sport", 7000)?;
            net.wait_bump(7000, "share")?;
            unheard(net, &talk)?;
            talk.finish()
        })
    });
}

#[test]
fn a_choice_ends_with_its_connection() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000";
        Setup::new().gateways().rule(rule).run(|net| {
            let connect = || connect_from(45_000, &net.behind[0], &net.behind[1], behind(7000));
            let first = connect()?;
            net.wait_bump(7000, "seal")?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            abort(first)?;
            // Before anybody has looked for connections that ended.
            let second = connect()?;
            let talk = Talk::over(&net.behind[0], &net.behind[1], second)?;
            talk.advance(256 << 10)?;
            net.wait_bump(7000, "seal")?;
            unheard(net, &talk)?;
            talk.finish()
        })
    });
}

#[test]
fn a_word_that_waited_moves_no_later_connection() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let connect = || connect_from(45_000, &net.behind[0], &net.behind[1], behind(7000));
            let first = connect()?;
            // Nobody but the daemons is kept from speaking.
            let withhold = "PREROUTING -s 10.0.0.0/16 -p udp -j DROP";
            net.b.host.run(&format!("iptables -t raw -I {withhold}"))?;
            let refusal = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(refusal.contains("did not answer"), "{refusal}");
            abort(first)?;
            let second = connect()?;
            net.b.host.run(&format!("iptables -t raw -D {withhold}"))?;
            net.wait_established()?;
            let talk = Talk::over(&net.behind[0], &net.behind[1], second)?;
            heard(net, &talk)?;
            ensure!(net.b.bumps(7000)? == ["plain"], "{:?}", net.b.bumps(7000)?);
            talk.finish()
        })
    });
}

#[test]
fn forged_packets_do_nothing_to_a_locked_connection() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let intruder = net.intruder()?;
            for net in ["192.168.7.0/24", "192.168.8.0/24"] {
                intruder.run(&format!("ip route add {net} via 10.0.3.1"))?;
            }
            let attacker = Attacker::on(&intruder)?;
            let ears = Capture::start(&net.b.host, "wlan0")?;
            let (mut near, mut far) = connect(&net.behind[0], &net.behind[1], behind(7000))?;
            far.write_all(b"the last words in plain")?;
            let mut words = [0; 23];
            near.read_exact(&mut words)?;
            let (seq, ack) = numbers(&ears.finish()?, &words).context("the words were heard")?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_locked(7000)?;
            let of_far = Segment {
                from: far.local_addr()?,
                to: near.local_addr()?,
                seq,
                ack,
                flags: ACK,
                payload: b"",
            };
            let of_near = Segment {
                from: of_far.to,
                to: of_far.from,
                seq: ack,
                ack: seq,
                ..of_far
            };
            // In the name of the far end, and of the host behind this very gateway.
            for segment in [of_far, of_near] {
                for (flags, payload) in [(ACK, &b"forged"[..]), (RST, b""), (SYN, b"")] {
                    let forged = Segment {
                        flags,
                        payload,
                        ..segment
                    };
                    // One by one, and again where one got lost on its way: each kind is dropped.
                    let dropped = || net.a.counter("plain_dropped");
                    let before = dropped()?;
                    wait("a forged packet to be dropped", || {
                        let sent = attacker.send_segment(&forged);
                        sent.is_ok() && dropped().is_ok_and(|now| now > before)
                    })?;
                }
            }
            let goes_on = |mut from: &TcpStream, mut to: &TcpStream| -> Result<()> {
                from.write_all(b"goes on")?;
                let mut heard = [0; 7];
                to.read_exact(&mut heard)?;
                ensure!(&heard == b"goes on", "{heard:?}");
                Ok(())
            };
            goes_on(&near, &far)?;
            goes_on(&far, &near)?;
            net.wait_locked(7000)
        })
    });
}

#[test]
fn hosts_outside_the_networks_get_nothing_through() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            // Where it would go if it were forwarded.
            net.b
                .host
                .run("ip route add 192.168.18.0/24 via 192.168.8.10")?;
            let rule = ["rule", "add", "--dport", "7000", "--bump", "seal"];
            net.a.ctl(&rule)?;
            let talk = net.talk_behind(7000)?;
            talk.advance(256 << 10)?;
            let ears = Capture::start(&net.behind[1], "eth0")?;
            let refused = || net.b.counter("inner_address_refused");
            let before = refused()?;
            // A gateway that is the attacker's: what it sends takes the bump.
            let attacker = Attacker::on(&net.a.host)?;
            let segment = |from: &str, to: &str| -> Result<Segment<'_>> {
                Ok(Segment {
                    from: from.parse()?,
                    to: to.parse()?,
                    seq: 1,
                    ack: 0,
                    flags: SYN,
                    payload: b"",
                })
            };
            for (from, to) in [
                ("192.168.99.9:666", "192.168.8.10:7000"),
                ("192.168.8.11:666", "192.168.8.10:7000"),
                ("192.168.7.10:666", "192.168.18.10:7000"),
            ] {
                attacker.send_segment(&segment(from, to)?)?;
            }
            wait("strangers to be refused", || {
                refused().is_ok_and(|now| now >= before + 3)
            })?;
            // A host behind that is none of the network's does not get into the TUN.
            let near = &net.behind[0];
            near.run("ip address add 192.168.77.7/24 dev eth0")?;
            let stray = Attacker::on(near)?;
            let tun = Capture::start(&net.a.host, "dibs3")?;
            stray.send_segment(&segment("192.168.77.7:666", "192.168.8.10:7000")?)?;
            talk.advance(SETTLED)?;
            let has_port = |frame: &[u8], at: usize| frame.get(at..at + 2) == Some(&[2, 154][..]);
            let (heard, into) = (ears.finish()?, tun.finish()?);
            let plain = heard.packets.iter().filter(|p| has_port(&p.frame, 34));
            // It is forwarded in plain, as without dibs.
            ensure!(plain.count() == 1, "strangers came through");
            ensure!(!into.packets.is_empty(), "nothing was heard on the TUN");
            let strays = into.packets.iter().filter(|p| has_port(&p.frame, 20));
            ensure!(strays.count() == 0, "a stray is in the TUN");
            talk.finish()
        })
    });
}

/// Packets that a host did not forward because they were too long.
fn too_long(node: &Node) -> Result<u64> {
    let counted = node.host.run("nstat -asz IpFragFails Ip6InTooBigErrors")?;
    let lines = counted.lines().filter(|line| line.starts_with("Ip"));
    let count = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    let counts: Option<Vec<u64>> = lines.map(count).collect();
    let counts = counts.filter(|counts| counts.len() == 2);
    Ok(counts.with_context(|| counted.clone())?.iter().sum())
}

#[test]
fn a_narrow_network_behind_the_far_gateway_stalls_nothing() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for route in [
                "ip route replace 192.168.8.0/24 dev in0 src 192.168.8.1 mtu lock 1300",
                "ip -6 route replace fd00:8::/64 dev in0 metric 256 mtu lock 1300",
            ] {
                net.b.host.run(route)?;
            }
            for bump in ["seal", "scramble", "share"] {
                let rule = ["rule", "add", "--src", "192.168.7.0/24", "--bump", bump];
                let v4 = net.a.ctl(&rule)?;
                let rule = ["rule", "add", "--src", "fd00:7::/64", "--bump", bump];
                let v6 = net.a.ctl(&rule)?;
                for server in [behind(7000), behind_v6(7001)] {
                    // Nobody has learned of it in plain before.
                    for host in &net.behind {
                        host.run("ip route flush cache")?;
                        host.run("ip -6 route flush cache")?;
                    }
                    let before = too_long(&net.b)?;
                    let talk = Talk::start(&net.behind[0], &net.behind[1], server)?;
                    talk.advance(SETTLED)
                        .with_context(|| format!("{bump} {server}"))?;
                    net.wait_bump(server.port(), bump)?;
                    talk.finish()?;
                    // Its sender is told once, and what was under way is lost, which is more on a busy machine; nothing of
                    // the 1,500 packets after that.
                    let lost = too_long(&net.b)? - before;
                    ensure!(
                        (1..=300).contains(&lost),
                        "{lost} packets too long: {bump} {server}"
                    );
                }
                for made in [v4, v6] {
                    net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
                }
            }
            Ok(())
        })
    });
}

#[test]
fn a_narrow_device_stalls_nothing() {
    isolated(|| {
        let vpn = [("vpn", "tun99")];
        Setup::new().gateways().devices(&vpn, &vpn).run(|net| {
            let at = |host: u8| IpAddr::from([10, 0, 1, host]);
            let _vpn = openvpn((&net.a.host, at(1)), (&net.b.host, at(2)))?;
            for node in [&net.a, &net.b] {
                node.host.run("ip link set tun99 mtu 1300")?;
                wait("the device to be seen", || {
                    let bumps = node.ctl(&["bump", "list"]).unwrap_or_default();
                    let mut bumps = bumps.as_array().into_iter().flatten();
                    bumps.any(|bump| bump["name"] == "vpn" && bump["reason"].is_null())
                })?;
            }
            let talk = net.talk_behind(7000)?;
            talk.advance(256 << 10)?;
            for bump in ["vpn", "plain", "vpn", "seal"] {
                net.a.put_on(bump, "--dport", 7000)?;
                net.wait_bump(7000, bump)?;
                match bump {
                    "plain" => heard(net, &talk),
                    _ => unheard(net, &talk),
                }
                .with_context(|| bump.to_owned())?;
            }
            talk.finish()
        })
    });
}

#[test]
fn gateways_that_both_masquerade_keep_what_is_on_a_bump_and_refuse_what_both_translated() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for node in [&net.a, &net.b] {
                node.host
                    .run("iptables -t nat -A POSTROUTING -j MASQUERADE")?;
            }
            let plain = net.talk_behind(7001)?;
            plain.advance(256 << 10)?;
            let said = net.a.refused(&["enable", "--dport", "7001"])?;
            ensure!(said.contains("the peer"), "{said}");
            let said = net.b.refused(&["enable", "--sport", "7001"])?;
            ensure!(said.contains("-A POSTROUTING -j MASQUERADE"), "{said}");
            let rule = ["rule", "add", "--dport", "7000", "--bump", "seal"];
            net.a.ctl(&rule)?;
            let ears = net.eavesdrop()?;
            let talk = net.talk_behind(7000)?;
            talk.advance(SETTLED)?;
            net.wait_bump(7000, "seal")?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            plain.advance(256 << 10)?;
            [talk, plain].into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn a_network_behind_one_host_and_the_other_host_itself() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let talk = Talk::start(&net.behind[0], &net.b.host, server(7000))?;
            talk.advance(256 << 10)?;
            for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                node.put_on("seal", end, 7000)?;
                net.wait_bump(7000, "seal")?;
                unheard(net, &talk)?;
                net.wait_locked(7000)?;
                // What is not TCP goes its usual way meanwhile.
                ping(&net.behind[0], behind(0).ip())?;
                node.put_on("plain", end, 7000)?;
                net.wait_bump(7000, "plain")?;
                talk.advance(256 << 10)?;
            }
            talk.finish()
        })
    });
}

/// With `src_valid_mark` the kernel asks by which device a packet's source is reached with the packet's mark.
#[test]
fn strict_reverse_path_filters_that_look_at_marks_drop_nothing() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for node in [&net.a, &net.b] {
                for name in ["all", "in0"] {
                    for key in ["rp_filter", "src_valid_mark"] {
                        let key = format!("net.ipv4.conf.{name}.{key}");
                        node.host.sysctl(&key, "1")?;
                    }
                }
            }
            let talk = net.talk_behind(7000)?;
            for bump in ["seal", "plain", "scramble"] {
                talk.advance(256 << 10)?;
                net.a.put_on(bump, "--dport", 7000)?;
                net.wait_bump(7000, bump)?;
                talk.advance(SETTLED)?;
            }
            unheard(net, &talk)?;
            talk.finish()
        })
    });
}

#[test]
fn a_rule_for_sockets_is_not_for_what_passes() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for term in [["--uid", "0"], ["--match", "-m owner --uid-owner 0"]] {
                let rule = ["rule", "add", "--dport", "7000", "--bump", "seal"];
                net.a.ctl(&[&rule[..], &term].concat())?;
            }
            let talk = net.talk_behind(7000)?;
            heard(net, &talk)?;
            net.wait_bump(7000, "plain")?;
            let terms = ["--match", "-m length --length 0:65535"];
            let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
            net.a.ctl(&[&rule[..], &terms].concat())?;
            net.wait_bump(7000, "scramble")?;
            unheard(net, &talk)?;
            talk.finish()
        })
    });
}

#[test]
fn who_does_not_forward_is_told() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.sysctl("net.ipv4.ip_forward", "0")?;
            let status = net.a.ctl(&["status"])?;
            let warnings = status["warnings"].to_string();
            let fix = "sysctl -w net.ipv4.ip_forward=1";
            ensure!(warnings.contains(fix), "{warnings}");
            let checked = net.a.ctl(&["check", "/run/dibs/dibsd.toml"])?;
            ensure!(checked["warnings"].to_string().contains(fix), "{checked}");
            ensure!(net.a.diagnosis("gateway")?.contains(fix));
            net.a.host.run(fix)?;
            let status = net.a.ctl(&["status"])?;
            ensure!(!status["warnings"].to_string().contains("gateway"));
            Ok(())
        })
    });
}

/// What a gateway exempts from conntrack cannot follow by its mark.
#[test]
fn untracked_connections_are_never_answered_in_plain() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            let exempt = "iptables -t raw -A PREROUTING -p tcp -j CT --notrack
                ip6tables -t raw -A PREROUTING -p tcp -j CT --notrack";
            net.b.host.shell(exempt)?;
            let rule = |node: &Node, port: &str| {
                let made = node.ctl(&["rule", "add", port, "7000", "--bump", "seal"]);
                made.map(drop)
            };
            rule(&net.a, "--dport")?;
            let ears = net.eavesdrop()?;
            for to in [behind(7000), behind_v6(7000)] {
                let _listener = net.behind[1].in_ns(|| TcpListener::bind(to))?;
                let before = net.b.counter("plain_dropped")?;
                let patience = Duration::from_secs(2);
                let connected = net.behind[0].in_ns(|| TcpStream::connect_timeout(&to, patience));
                ensure!(connected.is_err(), "{to} answered");
                wait(&format!("word of what {to} answered"), || {
                    net.b.counter("plain_dropped").is_ok_and(|now| now > before)
                })?;
            }
            // A rule at `b` needs no mark to follow.
            rule(&net.b, "--sport")?;
            let talk = net.talk_behind(7000)?;
            talk.advance(SETTLED)?;
            let segments = ears.finish()?.segments(7000);
            ensure!(segments == [0, 0], "in plain: {segments:?}");
            talk.finish()
        })
    });
}
