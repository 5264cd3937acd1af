//! Connections that plain does not carry stay on their bumps.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::retransmissions;
use dibs_netns::wait_until;
use netns_tests::daemon::{Node, SOON, wait};
use netns_tests::isolated;
use netns_tests::routed::{Routed, Router, exchange, server};
use netns_tests::traffic::{SETTLED, Talk};
use nix::sys::signal::Signal;

/// Bytes of an exchange.
const SOME: usize = 200_000;
/// Segments that a switch may have sent again, at most.
const FEW_RESENT: u64 = 5;
/// Bytes of an exchange: little enough for one window of a firewall that follows the numbers.
const FEW: usize = 10_000;

/// Time between two bursts of a transfer of 6 MB/s: more goes by the bump between a knock and the move than a firewall's slack.
const BUSY: Option<Duration> = Some(Duration::from_millis(10));
/// Time for which a transfer may stand still; one that its firewall had lost stood for 40 s, or for good.
const STALL: Duration = Duration::from_secs(20);

/// Adds a rule for a port of `b` on `a`; its number.
fn add_rule(net: &Routed, port: &str) -> Result<String> {
    let made = net
        .a
        .ctl(&["rule", "add", "--dport", port, "--bump", "seal"])?;
    Ok(made["id"].to_string())
}

/// `disable` said "2 connections now on plain", and the connections were dead.
fn stays(router: Router) -> Result<()> {
    Routed::run(router, |net| {
        let id = add_rule(net, "7000")?;
        let mut conn = net.connect(7000)?;
        exchange(&mut conn, FEW)?;
        net.a.wait_bump(7000, "seal")?;
        let mut check = |net: &Routed, what: &str| -> Result<()> {
            exchange(&mut conn, FEW)?;
            for node in [&net.a, &net.b] {
                let on = node.bumps(7000)?;
                ensure!(on == ["seal"], "{what} on {}: {on:?}", node.host.name());
            }
            Ok(())
        };
        for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
            let said = node.refused(&["disable", end, "7000"])?;
            ensure!(
                said.contains("the network does not carry it in plain") && said.contains("--force"),
                "{said}"
            );
            check(net, "disabled")?;
        }
        let said = net.a.refused(&["cleanup"])?;
        ensure!(said.contains("may break"), "{said}");
        check(net, "cleaned up")?;
        let said = net.a.refused(&["rule", "del", &id])?;
        ensure!(
            said.contains("is deleted") && said.contains("did not move"),
            "{said}"
        );
        let rules = net.a.ctl(&["rule", "list"])?;
        ensure!(rules.as_array().is_some_and(Vec::is_empty), "{rules}");
        check(net, "without its rule")?;
        // The state of it outlives the daemons.
        for _ in 0..2 {
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.a.wait_until_joined(1)?;
            check(net, "with another daemon")?;
        }
        let said = net.a.refused(&["disable", "--dport", "7000"])?;
        ensure!(
            said.contains("the network does not carry it in plain"),
            "{said}"
        );
        check(net, "disabled again")?;
        net.a.ctl(&["disable", "--dport", "7000", "--force"])?;
        net.a.wait_bump(7000, "plain")?;
        // The other commands do it likewise.
        for port in [7001, 7002] {
            let id = add_rule(net, &port.to_string())?;
            exchange(&mut net.connect(port)?, FEW)?;
            let mut conn = net.connect(port)?;
            exchange(&mut conn, FEW)?;
            net.a.wait_bump(port, "seal")?;
            match port {
                7001 => net.a.ctl(&["rule", "del", &id, "--force"])?,
                _ => net.a.ctl(&["cleanup", "--force"])?,
            };
            // It breaks by that, at once or later.
            wait("the connection to leave", || {
                net.a
                    .bumps(port)
                    .is_ok_and(|on| !on.contains(&"seal".to_owned()))
            })?;
        }
        Ok(())
    })
}

#[test]
fn a_connection_that_a_router_translates_stays() {
    isolated(|| stays(Router::Nat));
}

/// A stop takes connections to plain then, and those that a router has not seen break: it is said before, and Ctrl-C has to come again.
#[test]
fn a_stop_with_fail_open_says_first_which_connections_break() {
    isolated(|| {
        Routed::run(Router::Nat, |net| {
            let config = std::fs::read_to_string(net.a.directory().join("dibsd.toml"))?;
            net.a
                .configure(&config.replacen("[daemon]\n", "[daemon]\nfail = \"open\"\n", 1))?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            net.a.wait_until_joined(1)?;
            add_rule(net, "7000")?;
            let mut conn = net.connect(7000)?;
            exchange(&mut conn, FEW)?;
            net.a.wait_bump(7000, "seal")?;
            let warned = |node: &Node, how: &str| {
                let log = node.log();
                let lines = log
                    .lines()
                    .filter(|line| line.contains("connection(s) may break"));
                let lines = lines.filter(|line| line.contains(&server(7000).to_string()));
                lines
                    .filter(|line| line.contains("in plain") && line.contains(how))
                    .count()
            };
            net.a.signal(Signal::SIGINT)?;
            let again = "SIGINT again stops it anyway";
            wait_until(SOON, "a warning", || warned(&net.a, again) == 1)?;
            exchange(&mut conn, FEW)?;
            ensure!(net.a.bumps(7000)? == ["seal"]);
            net.a.stop(Signal::SIGINT)?;
            net.a.start()?;
            net.a.wait_until_joined(1)?;
            let mut conn = net.connect(7000)?;
            exchange(&mut conn, FEW)?;
            net.a.stop(Signal::SIGTERM)?;
            ensure!(warned(&net.a, "") == 2, "{}", net.a.log());
            net.a.start()
        })
    });
}

#[test]
fn a_connection_that_a_firewall_has_not_seen_begin_stays() {
    isolated(|| stays(Router::Firewall));
}

/// Far more than a window goes by the bump, `much` each way, and the two ends show the firewall in steps what it did not see.
fn caught_up(much: usize) -> Result<()> {
    Routed::run(Router::Firewall, |net| {
        net.router.shell(
            "nft add counter ip fw plain\n\
             nft add rule ip fw forward tcp dport 7000 counter name plain\n\
             nft add rule ip fw forward tcp sport 7000 counter name plain",
        )?;
        let plain = |net: &Routed| -> Result<u64> {
            let seen = net.router.run("nft -j list counter ip fw plain")?;
            let seen: serde_json::Value = serde_json::from_str(&seen)?;
            let packets = seen["nftables"][1]["counter"]["packets"].as_u64();
            packets.with_context(|| format!("{seen}"))
        };
        let mut conn = net.connect(7000)?;
        exchange(&mut conn, FEW)?;
        for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
            net.a.enable(7000)?;
            net.a.wait_locked(7000)?;
            let before = plain(net)?;
            for _ in 0..much / SOME {
                exchange(&mut conn, SOME)?;
            }
            let during = plain(net)?;
            ensure!(during == before, "{} packets in plain", during - before);
            let before = retransmissions(&conn.0)? + retransmissions(&conn.1)?;
            node.switch("disable", end, 7000)?;
            let shown = (plain(net)? - during) * 41;
            ensure!(shown < much as u64 / 1000, "{shown} bytes to catch up");
            exchange(&mut conn, FEW)?;
            let resent = retransmissions(&conn.0)? + retransmissions(&conn.1)? - before;
            ensure!(resent <= FEW_RESENT, "{resent} segments sent again");
        }
        // The same while both ends send.
        let talk = Talk::over(&net.a.host, &net.b.host, conn)?;
        for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
            net.a.enable(7000)?;
            talk.advance(30_000_000)?;
            node.switch("disable", end, 7000)?;
            ensure!(net.a.bumps(7000)? == ["plain"] && net.b.bumps(7000)? == ["plain"]);
            talk.advance(SETTLED)?;
        }
        talk.finish()
    })
}

#[test]
fn a_firewall_is_caught_up_with_before_a_connection_goes_to_plain() {
    isolated(|| caught_up(30_000_000));
}

#[test]
#[ignore = "takes a minute"]
fn a_firewall_is_caught_up_with_after_300_mb_each_way() {
    isolated(|| caught_up(300_000_000));
}

/// Bytes go by the bump between the knock and the move, which the firewall has not seen.
#[test]
fn a_transfer_goes_on_whether_or_not_it_goes_back_to_plain_at_once() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            for bursts in [[BUSY, None], [None, BUSY]] {
                let ends = net.connect(7000)?;
                let talk = Talk::in_bursts(bursts, &net.a.host, &net.b.host, ends)?;
                let received = || talk.received().into_iter().sum::<u64>();
                for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")].repeat(3) {
                    node.switch("enable", end, 7000)?;
                    // Refused is a knock that the firewall lost, and nothing worse.
                    let done = node.switch("disable", end, 7000);
                    if let Err(error) = &done {
                        ensure!(error.to_string().contains("--force"), "{error:?}");
                    }
                    let enough = received() + SETTLED;
                    wait_until(STALL, "the transfer to go on", || received() > enough)?;
                    let on = if done.is_ok() { "plain" } else { "seal" };
                    ensure!(net.a.bumps(7000)? == [on] && net.b.bumps(7000)? == [on]);
                }
                talk.finish()?;
            }
            Ok(())
        })
    });
}

/// Plain carries the one of two connections that a firewall has seen begin.
#[test]
fn a_connection_that_a_firewall_knows_goes_to_plain() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            let mut known = net.connect(7000)?;
            exchange(&mut known, FEW)?;
            let id = add_rule(net, "7000")?;
            net.a.wait_bump(7000, "seal")?;
            let mut unknown = net.connect(7000)?;
            exchange(&mut unknown, FEW)?;
            exchange(&mut known, FEW)?;
            wait("both on seal", || {
                net.b.bumps(7000).is_ok_and(|on| on == ["seal", "seal"])
            })?;
            let said = net.a.refused(&["rule", "del", &id])?;
            ensure!(said.contains("1 connection of it did not move"), "{said}");
            let mut on = net.a.bumps(7000)?;
            on.sort();
            ensure!(on == ["plain", "seal"], "{on:?}");
            exchange(&mut known, FEW)?;
            exchange(&mut unknown, FEW)?;
            // And by choice.
            net.a.enable(7000)?;
            exchange(&mut known, FEW)?;
            let said = net.a.refused(&["disable", "--dport", "7000"])?;
            ensure!(said.contains("1 connection did not move"), "{said}");
            exchange(&mut known, FEW)?;
            exchange(&mut unknown, FEW)?;
            // It forgets that one as well.
            net.a.enable(7000)?;
            exchange(&mut known, FEW)?;
            net.router.run("conntrack -D -p tcp")?;
            for (node, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                let said = node.refused(&["disable", end, "7000"])?;
                ensure!(said.contains("none of 2 connections moved"), "{said}");
                exchange(&mut known, FEW)?;
            }
            ensure!(net.b.bumps(7000)? == ["seal", "seal"]);
            Ok(())
        })
    });
}

/// Another program takes a connection to plain by its mark, which breaks it unless that is undone at once.
#[test]
fn a_mark_of_another_program_moves_nothing_that_plain_does_not_carry() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            add_rule(net, "7000")?;
            let mut conn = net.connect(7000)?;
            exchange(&mut conn, FEW)?;
            net.a.wait_bump(7000, "seal")?;
            let mark = "conntrack -U -p tcp -s 10.0.5.1 -d 10.0.9.2 --dport 7000 --mark 0x10000000";
            net.a.host.run(mark)?;
            wait("the mark to be undone", || {
                net.a
                    .log()
                    .contains("another program's move of a connection was undone")
            })?;
            exchange(&mut conn, FEW)?;
            net.a.wait_bump(7000, "seal")
        })
    });
}

/// There is nobody to ask whether plain carries it; the firewall does know it.
#[test]
fn while_the_peer_does_not_answer_nothing_goes_to_plain() {
    isolated(|| {
        Routed::run(Router::Firewall, |net| {
            let mut conn = net.connect(7000)?;
            exchange(&mut conn, FEW)?;
            net.a.enable(7000)?;
            exchange(&mut conn, FEW)?;
            net.b.stop(Signal::SIGKILL)?;
            let said = net.a.refused(&["disable", "--dport", "7000"])?;
            ensure!(said.contains("--force"), "{said}");
            net.b.start()?;
            net.a.wait_until_joined(1)?;
            exchange(&mut conn, FEW)?;
            ensure!(net.a.bumps(7000)? == ["seal"]);
            net.a.disable(7000)?;
            exchange(&mut conn, FEW)?;
            ensure!(net.a.bumps(7000)? == ["plain"]);
            Ok(())
        })
    });
}
