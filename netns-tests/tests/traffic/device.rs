//! Devices of other programs as bumps: OpenVPN, wireguard-go, and what is none of ours stays so.

use std::io::{Read as _, Write as _};
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::baseline::Tunnel;
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::{Talk, connect};
use netns_tests::vpn::{self, OPENVPN, WIREGUARD_GO};
use netns_tests::{Net, Node, Setup, isolated};

/// More than can be under way.
const SETTLED: u64 = 2 << 20;

/// The bytes of payload in a full segment of the connection to port 7000.
fn segment(node: &Node) -> Result<u64> {
    let shown = node.host.run("ss -tniH dport = :7000")?;
    let mss = shown
        .split_whitespace()
        .find_map(|word| word.strip_prefix("mss:"));
    Ok(mss.with_context(|| format!("no mss in {shown}"))?.parse()?)
}

#[test]
fn live_connections_go_by_openvpn_and_come_back() {
    isolated(|| go_and_come_back(vpn::with(OPENVPN), vpn::openvpn));
}

#[test]
fn live_connections_go_by_wireguard_go_and_come_back() {
    isolated(|| go_and_come_back(vpn::with(WIREGUARD_GO), vpn::wireguard_go));
}

fn go_and_come_back(setup: Setup, connect: fn(&Net) -> Result<Tunnel>) -> Result<()> {
    setup.run(|net| {
        let _vpn = connect(net)?;
        let ears = net.eavesdrop()?;
        let talk = net.talk(7000)?;
        talk.advance(SETTLED)?;
        let mut through = Vec::new();
        for bump in ["vpn", "plain", "vpn", "scramble", "vpn", "seal", "vpn"] {
            net.a.put_on(bump, "--dport", 7000)?;
            net.wait_bump(7000, bump)?;
            talk.advance(SETTLED)?;
            if bump == "vpn" {
                let start = SystemTime::now();
                talk.advance(SETTLED)?;
                through.push(start..SystemTime::now());
                let known = vpn::bump(&net.a)?;
                ensure!(known["connections"] == 1, "{known:#}");
            }
        }
        let heard = ears.finish()?;
        for during in &through {
            let plain = heard.plain(&talk.plaintexts, during);
            ensure!(plain == [0, 0], "in plain: {plain:?}");
        }
        net.b.put_on("plain", "--sport", 7000)?;
        net.wait_bump(7000, "plain")?;
        talk.advance(SETTLED)?;
        talk.finish()
    })
}

#[test]
fn a_device_that_vanishes_blocks_until_it_is_back() {
    isolated(|| {
        vpn::with(OPENVPN).run(|net| {
            let vpn = vpn::openvpn(net)?;
            let events = net.a.events()?;
            let talk = net.talk(7000)?;
            net.a.put_on("vpn", "--dport", 7000)?;
            net.wait_bump(7000, "vpn")?;
            net.wait_locked(7000)?;
            talk.advance(SETTLED)?;
            let mut ears = net.eavesdrop()?;
            ears.from_now();
            // The device goes with its program.
            drop(vpn);
            wait("word of it", || events.stdout().contains("device_lost"))?;
            talk.stands_still(std::time::Duration::from_secs(2))?;
            let refused = net
                .a
                .refused(&["enable", "--dport", "7000", "--bump", "vpn"])?;
            ensure!(
                refused.contains("device tun99 of bump vpn is not there"),
                "{refused}"
            );
            let _vpn = vpn::openvpn(net)?;
            wait("word of it", || events.stdout().contains("device_back"))?;
            talk.advance(SETTLED)?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()
        })
    });
}

#[test]
fn a_smaller_mtu_stops_nothing_and_is_forgotten() {
    isolated(|| {
        vpn::with(OPENVPN).run(|net| {
            let _vpn = vpn::openvpn(net)?;
            let of_device = |mtu: u32| -> Result<()> {
                for node in [&net.a, &net.b] {
                    node.host.run(&format!("ip link set {OPENVPN} mtu {mtu}"))?;
                }
                Ok(())
            };
            of_device(1400)?;
            let talk = net.talk(7000)?;
            talk.advance(SETTLED)?;
            let before = segment(&net.a)?;
            net.a.put_on("vpn", "--dport", 7000)?;
            net.wait_bump(7000, "vpn")?;
            talk.advance(SETTLED)?;
            ensure!(segment(&net.a)? <= 1360, "{} bytes", segment(&net.a)?);
            // Locked, it still hears of it when that changes.
            net.wait_locked(7000)?;
            of_device(1300)?;
            talk.advance(SETTLED)?;
            ensure!(segment(&net.a)? <= 1260, "{} bytes", segment(&net.a)?);
            net.a.put_on("plain", "--dport", 7000)?;
            net.wait_bump(7000, "plain")?;
            talk.advance(SETTLED)?;
            let after = segment(&net.a)?;
            ensure!(after == before, "{before} bytes, and then {after}");
            talk.finish()
        })
    });
}

#[test]
fn over_ipv6_too() {
    isolated(|| {
        vpn::with(OPENVPN).run(|net| {
            let _vpn = vpn::openvpn(net)?;
            for node in [&net.a, &net.b] {
                node.host.run(&format!("ip link set {OPENVPN} mtu 1400"))?;
            }
            let talk = Talk::start(&net.a.host, &net.b.host, server_v6(7000))?;
            talk.advance(SETTLED)?;
            for bump in ["vpn", "scramble", "vpn", "plain"] {
                net.a.put_on(bump, "--dport", 7000)?;
                net.wait_bump(7000, bump)?;
                talk.advance(SETTLED)?;
            }
            let node = &net.a;
            node.host.sysctl("net.ipv6.conf.tun99.disable_ipv6", "1")?;
            let refused = node.refused(&["enable", "--dport", "7000", "--bump", "vpn"])?;
            ensure!(
                refused.contains("device tun99 of bump vpn has no IPv6"),
                "{refused}"
            );
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

#[test]
fn devices_go_by_their_names_not_their_numbers() {
    isolated(|| {
        let of_a = [("vpn", OPENVPN), ("other", "tun8"), ("third", "tun7")];
        let of_b = [("spare", "tun6"), ("other", "tun8"), ("vpn", OPENVPN)];
        Setup::new().devices(&of_a, &of_b).run(|net| {
            let _vpn = vpn::openvpn(net)?;
            let talk = net.talk(7000)?;
            for node in [&net.a, &net.b] {
                // A device with an address, that leads nowhere.
                node.host.run("ip link add tun7 type veth peer name tun8")?;
                for device in ["tun7", "tun8"] {
                    node.host
                        .run(&format!("ip address add 10.7.0.1/32 dev {device}"))?;
                    node.host.run(&format!("ip link set {device} up"))?;
                }
            }
            net.a.put_on("vpn", "--dport", 7000)?;
            net.wait_bump(7000, "vpn")?;
            talk.advance(SETTLED)?;
            net.b.put_on("plain", "--sport", 7000)?;
            net.wait_bump(7000, "plain")?;
            net.b.put_on("vpn", "--sport", 7000)?;
            net.wait_bump(7000, "vpn")?;
            talk.advance(SETTLED)?;
            let enable = |bump| {
                net.a
                    .refused(&["enable", "--dport", "7000", "--bump", bump])
            };
            let why = enable("third")?;
            ensure!(
                why.contains("peer server does not carry the bump \"third\""),
                "{why}"
            );
            net.b.host.run("ip link del tun8")?;
            let why = enable("other")?;
            ensure!(
                why.contains("the peer's device of this bump does not exist"),
                "{why}"
            );
            net.wait_bump(7000, "vpn")?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

#[test]
fn what_carries_a_device_does_not_go_into_it() {
    isolated(|| {
        let devices = [("own", "tun5")];
        Setup::new().devices(&devices, &devices).run(|net| {
            // This process serves the device, and has the connection.
            let open = || dibs_io::Tun::open("tun5", 1500);
            let _serving = [net.a.host.in_ns(open)?, net.b.host.in_ns(open)?];
            for (number, node) in [&net.a, &net.b].into_iter().enumerate() {
                node.host
                    .run(&format!("ip address add 10.5.0.{number}/32 dev tun5"))?;
                node.host.run("ip link set tun5 up")?;
            }
            let _conn = connect(&net.a.host, &net.b.host, server(7000))?;
            let refused = net.a.refused(&["enable", "--all", "--bump", "own"])?;
            ensure!(
                refused
                    .contains("the device of this bump sends its own packets over this connection"),
                "{refused}"
            );
            let refused = net.a.refused(&["rule", "add", "--all", "--bump", "own"])?;
            ensure!(refused.contains("carries the bump's device"), "{refused}");
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "own"])?;
            net.wait_bump(7000, "plain")
        })
    });
}

#[test]
fn a_rule_that_requires_a_device_lets_nothing_out_without_it() {
    isolated(|| {
        let rule = "bump = \"vpn\"\ndport = 7000\nrequire = true";
        vpn::with(OPENVPN).rule(rule).run(|net| {
            let mut ears = net.eavesdrop()?;
            ears.from_now();
            let from = &net.a.host;
            let none = from.run("socat -u OPEN:/dev/null TCP:10.0.1.2:7000,connect-timeout=2");
            ensure!(none.is_err(), "it connected");
            let _vpn = vpn::openvpn(net)?;
            let talk = net.talk(7000)?;
            talk.advance(SETTLED)?;
            net.wait_bump(7000, "vpn")?;
            let plaintexts = talk.plaintexts;
            talk.finish()?;
            let heard = ears.finish()?;
            let of_port = heard.segments(7000);
            ensure!(of_port == [0, 0], "in plain: {of_port:?} segments");
            let all = SystemTime::UNIX_EPOCH..SystemTime::now();
            ensure!(heard.plain(&plaintexts, &all) == [0, 0], "in plain");
            Ok(())
        })
    });
}

/// Waits until `bump list` says this of the device.
fn wait_answers(node: &Node, answers: Option<bool>) -> Result<()> {
    let mut known = serde_json::Value::Null;
    let found = wait("word of whether the device answers", || {
        known = vpn::bump(node).unwrap_or_default();
        known["connections"] == 1 && known["answers"].as_bool() == answers
    });
    found.with_context(|| format!("{known:#}"))
}

#[test]
fn a_device_through_which_nothing_passes_is_found_out_and_left() {
    isolated(|| {
        vpn::with(OPENVPN).run(|net| {
            let vpn = vpn::openvpn_as_it_comes(net)?;
            let talk = net.talk(7000)?;
            talk.advance(SETTLED)?;
            let known = vpn::bump(&net.a)?;
            ensure!(
                known["reason"].is_null() && known["answers"].is_null(),
                "{known:#}"
            );
            let why = net
                .a
                .refused(&["enable", "--dport", "7000", "--bump", "vpn"])?;
            for part in [
                "nothing came back over device tun99 of bump vpn",
                "--allow-recursive-routing",
                "the connections are back where they were",
            ] {
                ensure!(why.contains(part), "{part}: {why}");
            }
            net.wait_bump(7000, "plain")?;
            talk.advance(SETTLED)?;
            let known = vpn::bump(&net.a)?;
            ensure!(known["answers"] == false, "{known:#}");
            // From a bump it goes back to that bump.
            net.a.put_on("scramble", "--dport", 7000)?;
            net.wait_bump(7000, "scramble")?;
            net.a
                .refused(&["enable", "--dport", "7000", "--bump", "vpn"])?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;

            drop(vpn);
            let _vpn = vpn::openvpn(net)?;
            net.a.put_on("vpn", "--dport", 7000)?;
            net.wait_bump(7000, "vpn")?;
            wait_answers(&net.a, Some(true))?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

#[test]
fn of_a_device_by_which_nothing_was_sent_nobody_says_that_it_answers() {
    isolated(|| {
        vpn::with(OPENVPN).run(|net| {
            let vpn = vpn::openvpn_as_it_comes(net)?;
            let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
            let enable = ["enable", "--dport", "7000", "--bump", "vpn"];
            let moved = net.a.ctl(&enable)?;
            ensure!(
                moved["warnings"]
                    .to_string()
                    .contains("shows whether answers come back"),
                "{moved:#}"
            );
            net.wait_bump(7000, "vpn")?;
            wait_answers(&net.a, None)?;
            // Once it sends, it shows.
            near.write_all(b"is anybody there?")?;
            wait_answers(&net.a, Some(false))?;
            drop(vpn);
            let _vpn = vpn::openvpn(net)?;
            let mut heard = [0; 17];
            far.set_read_timeout(Some(SOON))?;
            far.read_exact(&mut heard)?;
            wait_answers(&net.a, Some(true))
        })
    });
}
