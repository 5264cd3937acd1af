//! Rules by what only the kernel can tell, by the time of day, and by preference; and what cannot be.

use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, wait_until};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{Talk, connect};
use netns_tests::{Net, Setup, isolated, kernel};
use nix::sys::signal::Signal;
use socket2::SockRef;
use std::io::{Read as _, Write as _};

/// More than can still be under way on a link.
const SETTLED: u64 = 2 << 20;

fn add(net: &Net, arguments: &[&str]) -> Result<String> {
    let made = net.a.ctl(&[&["rule", "add"], arguments].concat())?;
    Ok(made["id"].to_string())
}

#[test]
fn what_only_the_kernel_can_tell_moves_connections_that_are_there() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            for term in [
                ["--gid", "0"],
                ["--interface", "eth0"],
                ["--match", "-m length --length 0:65535"],
            ] {
                let rule = [&["--dport", "7000", "--bump", "scramble"][..], &term].concat();
                let id = add(net, &rule)?;
                net.wait_bump(7000, "scramble")
                    .with_context(|| format!("{term:?}"))?;
                talk.advance(SETTLED)?;
                let ears = net.eavesdrop()?;
                talk.advance(1 << 20)?;
                ears.heard_nothing(&talk.plaintexts, 1 << 20)?;
                net.wait_locked(7000)?;
                net.a.ctl(&["rule", "del", &id])?;
                net.wait_bump(7000, "plain")
                    .with_context(|| format!("{term:?}"))?;
                talk.advance(256 << 10)?;
            }
            talk.finish()
        })
    });
}

#[test]
fn a_rule_takes_a_connection_that_another_let_go_just_before_the_daemon_was_killed() {
    isolated(|| {
        // Its kernel rule stands behind OVERRIDE, which the daemon alone can lift. Because of the other one
        // not all marks are cleared.
        let rule = ["--dport", "7000", "--bump", "scramble", "--gid", "0"];
        let other = "bump = \"scramble\"\ndport = 7001";
        Setup::new().rule(other).run(|net| {
            let talk = net.talk(7000)?;
            let id = add(net, &rule)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            net.a.ctl(&["rule", "del", &id])?;
            net.a.stop(Signal::SIGKILL)?;
            let marked = kernel::marked(&net.a.host)?;
            let mark = format!("mark={} ", 0x1000_0000);
            ensure!(
                marked.len() == 1 && marked[0].contains(&mark),
                "not OVERRIDE alone: {marked:?}"
            );
            net.a.start()?;
            net.wait_established()?;
            add(net, &rule)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

#[test]
fn a_connection_follows_when_its_dscp_changes() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"seal\"\ndscp = \"EF\"")
            .run(|net| {
                let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
                let mut say = |near: &mut TcpStream| -> Result<()> {
                    let mut heard = [0; 4];
                    near.write_all(b"word")?;
                    far.read_exact(&mut heard)?;
                    ensure!(&heard == b"word");
                    Ok(())
                };
                say(&mut near)?;
                ensure!(net.a.bumps(7000)? == ["plain"]);
                SockRef::from(&near).set_tos_v4(46 << 2)?;
                say(&mut near)?;
                net.wait_bump(7000, "seal")?;
                // What it was taken by may pass.
                SockRef::from(&near).set_tos_v4(0)?;
                say(&mut near)?;
                net.wait_bump(7000, "seal")
            })
    });
}

#[test]
fn the_time_of_day_moves_connections_when_it_begins_and_ends() {
    isolated(|| {
        let rule = |port, time| format!("bump = \"scramble\"\ndport = {port}\ntime = \"{time}\"");
        Setup::new()
            .rule(&rule(7000, "22:00-08:00"))
            .rule(&rule(7001, "08:00-09:00"))
            .without_daemons()
            .run(|net| {
                net.a.set_time_of_day(7 * 3600);
                net.start()?;
                let [night, day] = [net.talk(7000)?, net.talk(7001)?];
                night.advance(256 << 10)?;
                day.advance(256 << 10)?;
                net.wait_bump(7000, "scramble")?;
                net.wait_bump(7001, "plain")?;
                // A daemon that begins so shortly before eight that one need not wait for long, and still is seen
                // before eight, however slow the machine.
                for lead in [5, 20, 80, HANG.as_secs() as u32] {
                    net.a.stop(Signal::SIGTERM)?;
                    net.a.set_time_of_day(8 * 3600 - lead);
                    net.start()?;
                    let on_bump = |port| net.a.bumps(port).is_ok_and(|on| on == ["scramble"]);
                    let mut is_night = false;
                    wait("night or day", || {
                        is_night = on_bump(7000);
                        is_night || on_bump(7001)
                    })?;
                    if is_night {
                        break;
                    }
                }
                let turned = || {
                    let bumps = |port| net.a.bumps(port).unwrap_or_default();
                    bumps(7000) == ["plain"] && bumps(7001) == ["scramble"]
                };
                wait_until(HANG * 2, "eight o'clock", turned)?;
                net.wait_bump(7000, "plain")?;
                net.wait_bump(7001, "scramble")?;
                night.advance(256 << 10)?;
                day.advance(SETTLED)?;
                let ears = net.eavesdrop()?;
                day.advance(1 << 20)?;
                ears.heard_nothing(&day.plaintexts, 1 << 20)?;
                let rules = net.a.ctl(&["rule", "list"])?;
                ensure!(
                    rules[0]["active"] == false && rules[1]["active"] == true,
                    "{rules:#}"
                );
                // New ones are sorted by the kernel.
                let late = net.talk(7001)?;
                late.advance(256 << 10)?;
                [night, day, late].into_iter().try_for_each(Talk::finish)
            })
    });
}

#[test]
fn a_preferred_bump_is_taken_once_there_is_a_session_and_never_left_for_want_of_one() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = [7000, 7001]\nprefer = true";
        Setup::new().rule(rule).without_daemons().run(|net| {
            net.a.start()?;
            let first = net.talk(7000)?;
            first.advance(256 << 10)?;
            ensure!(net.a.bumps(7000)? == ["plain"], "{:?}", net.a.bumps(7000)?);
            net.b.start()?;
            net.wait_established()?;
            net.wait_bump(7000, "seal")?;
            first.advance(SETTLED)?;

            let ears = net.eavesdrop()?;
            net.b.stop(Signal::SIGKILL)?;
            first.stands_still(Duration::from_secs(1))?;
            wait("the session to be missed", || {
                net.a
                    .ctl(&["peer", "list"])
                    .is_ok_and(|peers| peers[0]["state"] != "established")
            })?;
            // What begins now is plain; the other waits.
            let second = net.talk(7001)?;
            second.advance(256 << 10)?;
            ensure!(net.a.bumps(7001)? == ["plain"], "{:?}", net.a.bumps(7001)?);
            ensure!(net.a.bumps(7000)? == ["seal"], "{:?}", net.a.bumps(7000)?);
            first.stands_still(Duration::from_millis(500))?;
            net.b.start()?;
            net.wait_established()?;
            for (port, talk) in [(7000, &first), (7001, &second)] {
                net.wait_bump(port, "seal")?;
                talk.advance(SETTLED)?;
            }
            ears.heard_nothing(&first.plaintexts, 1 << 20)?;
            [first, second].into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn a_rule_made_without_a_session_waits_or_is_plain_as_it_says() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            net.a.start()?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            let usual = ["rule", "add", "--dport", "7000", "--bump", "seal"];
            let said = net.a.refused(&usual)?;
            ensure!(said.contains("no session"), "{said}");
            add(net, &["--dport", "7000", "--bump", "seal", "--prefer"])?;
            talk.advance(256 << 10)?;
            ensure!(net.a.bumps(7000)? == ["plain"]);
            // A connection to come waits where it is not preferred.
            add(net, &["--dport", "7001", "--bump", "seal"])?;
            let early = net.a.host.in_ns(|| {
                TcpStream::connect_timeout(&server(7001), Duration::from_secs(1)).map(drop)
            });
            ensure!(early.is_err(), "connected without a session");
            net.b.start()?;
            net.wait_established()?;
            net.wait_bump(7000, "seal")?;
            talk.advance(256 << 10)?;
            talk.finish()
        })
    });
}

#[test]
fn rules_that_cannot_be_are_refused_by_name_and_leave_nothing() {
    isolated(|| {
        Setup::new().run(|net| {
            let before = kernel::state(&net.a.host)?;
            let refused = |arguments: &[&str], words: &str| -> Result<()> {
                let said = net.a.refused(&[&["rule", "add"], arguments].concat())?;
                ensure!(said.contains(words), "{arguments:?}: {said}");
                Ok(())
            };
            let with_match = |text| ["--dport", "80", "--bump", "seal", "--match", text];
            refused(
                &with_match("-m set --match-set nowhere dst"),
                "iptables refuses it: Set nowhere",
            )?;
            refused(&with_match("-m dscp --dscp 99"), "iptables refuses it")?;
            refused(
                &with_match("-m owner --uid-owner 0 -j ACCEPT"),
                "may not use \"-j\"",
            )?;
            refused(
                &with_match("-m length --length 1\n-A INPUT"),
                "control character",
            )?;
            refused(
                &["--gid", "0", "--bump", "seal", "--require"],
                "a rule with gid cannot require",
            )?;
            refused(
                &["--time", "8-18", "--bump", "seal"],
                "write \"08:00-18:00\"",
            )?;
            let after = kernel::state(&net.a.host)?;
            let new: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
            // Tables that iptables made on being asked are empty.
            ensure!(new.iter().all(|line| !line.contains("DIBS")), "{new:#?}");

            let id = add(net, &["--dport", "80", "--bump", "seal", "--require"])?;
            let stands = format!("as rule {id}, for \"seal\"");
            refused(
                &["--dport", "80", "--bump", "scramble"],
                &format!("selects the same connections {stands}"),
            )?;
            refused(
                &["--dport", "80", "--bump", "seal", "--prefer"],
                "selects the same connections",
            )?;
            refused(
                &["--dst", "10.0.1.2", "--bump", "scramble", "--require"],
                "requires another bump of some of the same connections",
            )?;
            ensure!(
                net.a
                    .ctl(&["rule", "list"])?
                    .as_array()
                    .is_some_and(|rules| rules.len() == 1)
            );
            Ok(())
        })?;
        // Those of the file wait, and stand at a line.
        Setup::new()
            .rule("bump = \"seal\"\ndport = 80\nmatch = \"-m set --match-set nowhere dst\"")
            .without_daemons()
            .run(|net| {
                net.a.start()?;
                let file = std::fs::read_to_string(net.a.directory().join("dibsd.toml"))?;
                let line = file.lines().position(|line| line.starts_with("match"));
                let place = format!("dibsd.toml:{}:9: ", line.context("the rule")? + 1);
                let why = "rule 1 is not in force, because the kernel does not take it yet: iptables refuses it: Set nowhere";
                let log = net.a.log();
                ensure!(log.contains(&place) && log.contains(why), "{log}");
                let status = net.a.ctl(&["status"])?;
                ensure!(status["warnings"].to_string().contains(why), "{status}");
                let rules = net.a.ctl(&["rule", "list"])?;
                ensure!(rules[0]["active"] == false, "{rules}");
                ensure!(rules[0]["note"].to_string().contains(why), "{rules}");
                let left = kernel::state(&net.a.host)?;
                ensure!(left.iter().all(|line| !line.contains("DIBS")), "{left:#?}");
                Ok(())
            })
    });
}

#[test]
fn the_highest_priority_decides_then_the_file() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"scramble\"\ndport = 7000")
            .run(|net| {
                let talk = net.talk(7000)?;
                net.wait_bump(7000, "scramble")?;
                let low = add(net, &["--dst", "10.0.1.2", "--bump", "seal"])?;
                net.wait_bump(7000, "scramble")?;
                let high = add(
                    net,
                    &[
                        "--sport",
                        &talk.client.port().to_string(),
                        "--bump",
                        "seal",
                        "--priority",
                        "1",
                    ],
                )?;
                net.wait_bump(7000, "seal")?;
                talk.advance(1 << 20)?;
                let listed = net.a.ctl(&["rule", "list"])?;
                let ids: Vec<String> = listed
                    .as_array()
                    .context("a list")?
                    .iter()
                    .map(|rule| rule["id"].to_string())
                    .collect();
                ensure!(ids == [high.as_str(), "1", low.as_str()], "{listed:#}");
                net.a.ctl(&["rule", "del", &high])?;
                net.wait_bump(7000, "scramble")?;
                talk.advance(1 << 20)?;
                talk.finish()
            })
    });
}

/// Says what the file's rules are from now on, and has the daemon of `a` take them; `said` is what it logs then.
fn reload(net: &mut Net, file: &str, rules: &str, said: &str) -> Result<()> {
    net.a.configure(&format!("{file}{rules}"))?;
    let before = net.a.log().matches(said).count();
    net.a.reload()?;
    wait(said, || net.a.log().matches(said).count() > before)
}

#[test]
fn the_rules_of_the_file_are_taken_anew_and_nothing_else_of_it() {
    isolated(|| {
        Setup::new().run(|net| {
            let file = std::fs::read_to_string(net.a.directory().join("dibsd.toml"))?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            let rule = |port: u16, bump: &str| {
                format!("\n[[rule]]\nbump = \"{bump}\"\nprotocol = \"tcp\"\ndport = {port}\n")
            };
            // A new rule takes a connection that is there; another one changes its bump; without any it is free.
            reload(
                net,
                &file,
                &rule(7000, "seal"),
                "1 rule(s) of the configuration file are in force",
            )?;
            net.wait_bump(7000, "seal")?;
            talk.advance(SETTLED)?;
            let two = rule(7001, "share") + &rule(7000, "scramble");
            reload(
                net,
                &file,
                &two,
                "2 rule(s) of the configuration file are in force",
            )?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            // What dibsctl made stays.
            add(net, &["--dport", "7002", "--bump", "seal"])?;
            // A file that cannot be taken changes nothing.
            reload(
                net,
                &file,
                &rule(7000, "sael"),
                "the configuration file was not applied",
            )?;
            ensure!(
                net.a.bumps(7000)? == ["scramble"],
                "{:?}",
                net.a.bumps(7000)?
            );
            // One that the file contradicts gives way, and nothing else.
            add(net, &["--dport", "7003", "--bump", "seal", "--require"])?;
            let against = rule(7003, "share") + "require = true\n" + &two;
            reload(
                net,
                &file,
                &against,
                "3 rule(s) of the configuration file are in force",
            )?;
            ensure!(
                net.a.log().contains("contradicts the configuration file"),
                "{}",
                net.a.log()
            );
            // Other sections wait for a restart, and are named.
            let slower = file.replacen("[daemon]", "[daemon]\ntrusted_share = 0.25", 1);
            ensure!(slower != file, "the file has a section [daemon]");
            reload(
                net,
                &slower,
                "",
                "[daemon] of the configuration file changed",
            )?;
            net.wait_bump(7000, "plain")?;
            talk.advance(SETTLED)?;
            let rules = net.a.ctl(&["rule", "list"])?;
            let ports: Vec<String> = { rules.as_array().into_iter().flatten() }
                .map(|rule| rule["selector"].to_string())
                .collect();
            ensure!(ports.len() == 1 && ports[0].contains("7002"), "{rules}");
            talk.finish()
        })
    });
}

#[test]
fn what_cleanup_took_down_stands_again_after_a_reload() {
    isolated(|| {
        Setup::new().run(|net| {
            let file = std::fs::read_to_string(net.a.directory().join("dibsd.toml"))?;
            let rule = "\n[[rule]]\nbump = \"seal\"\nprotocol = \"tcp\"\ndport = 7000\n";
            reload(
                net,
                &file,
                rule,
                "1 rule(s) of the configuration file are in force",
            )?;
            net.a.ctl(&["cleanup"])?;
            let talk = net.talk(7001)?;
            talk.advance(256 << 10)?;
            reload(
                net,
                &file,
                rule,
                "1 rule(s) of the configuration file are in force",
            )?;
            let ruled = net.talk(7000)?;
            net.wait_bump(7000, "seal")?;
            ruled.advance(SETTLED)?;
            ruled.finish()?;
            talk.finish()
        })
    });
}
