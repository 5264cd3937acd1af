//! What dibs does to the kernel, and what it leaves alone.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::Talk;
use netns_tests::{Net, Node, Setup, isolated, kernel};
use nix::sys::signal::Signal;

fn states(net: &Net) -> Result<[Vec<String>; 2]> {
    Ok([kernel::state(&net.a.host)?, kernel::state(&net.b.host)?])
}

/// Connections that begin at most while something is done.
const MOST: usize = 500;

/// What is in one state and not in the other.
fn difference(before: &[Vec<String>; 2], after: &[Vec<String>; 2]) -> Vec<String> {
    let mut lines = Vec::new();
    for (before, after) in before.iter().zip(after) {
        let gone = before.iter().filter(|line| !after.contains(line));
        lines.extend(gone.map(|line| format!("- {line}")));
        let new = after.iter().filter(|line| !before.contains(line));
        lines.extend(new.map(|line| format!("+ {line}")));
    }
    lines
}

fn expect_same(before: &[Vec<String>; 2], after: &[Vec<String>; 2]) -> Result<()> {
    let difference = difference(before, after);
    ensure!(difference.is_empty(), "{difference:#?}");
    Ok(())
}

#[test]
fn nothing_enabled_nothing_installed() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let before = states(net)?;
            net.start()?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            expect_same(&before, &states(net)?)?;
            talk.finish()
        })
    });
}

/// A rule puts connections on its bump until the kernel has it no more.
#[test]
fn what_begins_while_cleanup_moves_the_others_goes_on_too() {
    isolated(|| {
        Setup::new().run(|net| {
            net.a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
            // A program that is being started may still have a listener that was closed, so there is one for all.
            let listener = net.b.host.in_ns(|| TcpListener::bind(server(7000)))?;
            let begin = || -> Result<(TcpStream, TcpStream)> {
                let called = || TcpStream::connect_timeout(&server(7000), Duration::from_secs(10));
                let near = net.a.host.in_ns(called)?;
                let far = listener.accept()?.0;
                for stream in [&near, &far] {
                    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
                }
                Ok((near, far))
            };
            let mut conns = vec![begin()?];
            net.wait_bump(7000, "seal")?;
            std::thread::scope(|scope| {
                let cleanup = scope.spawn(|| net.a.ctl(&["cleanup"]));
                while !cleanup.is_finished() && conns.len() < MOST {
                    conns.push(begin()?);
                }
                cleanup.join().expect("no panic").map(drop)
            })?;
            ensure!(conns.len() > 2, "nothing began meanwhile");
            net.wait_bump(7000, "plain")?;
            for (near, far) in &mut conns {
                let mut received = [0; 5];
                near.write_all(b"hello")?;
                far.read_exact(&mut received)?;
                far.write_all(&received)?;
                near.read_exact(&mut received)?;
                ensure!(received == *b"hello");
            }
            Ok(())
        })
    });
}

#[test]
fn cleanup_leaves_the_connection_in_plain_and_nothing_in_the_kernel() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let before = states(net)?;
            net.start()?;
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            ensure!(!difference(&before, &states(net)?).is_empty());

            for node in [&net.a, &net.b] {
                node.ctl(&["cleanup"])?;
            }
            expect_same(&before, &states(net)?)?;
            let clean = SystemTime::now();
            talk.advance(1 << 20)?;
            let during = clean..SystemTime::now();
            let plain = ears.finish()?.plain(&talk.plaintexts, &during);
            ensure!(plain[0] > 0 && plain[1] == 0, "{plain:?}");
            talk.finish()
        })
    });
}

#[test]
fn cleanup_lets_go_of_what_a_daemon_left_that_runs_no_more() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let before = states(net)?;
            net.start()?;
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            for node in [&mut net.a, &mut net.b] {
                node.stop(Signal::SIGTERM)?;
            }
            talk.stands_still(Duration::from_secs(1))?;

            let with_bump = states(net)?;
            let said = net.a.refused(&["cleanup"])?;
            ensure!(said.contains("on bumps (1 of them)"), "{said}");
            expect_same(&with_bump, &states(net)?)?;
            for node in [&net.a, &net.b] {
                node.ctl(&["cleanup", "--force"])?;
            }
            expect_same(&before, &states(net)?)?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn cleanup_without_a_session_is_refused_and_names_what_would_break() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = [net.talk(7000)?, net.talk(7001)?];
            for (port, talk) in [7000, 7001].into_iter().zip(&talks) {
                net.a.enable(port)?;
                net.wait_bump(port, "scramble")?;
                talk.advance(256 << 10)?;
            }
            net.b.stop(Signal::SIGKILL)?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            let said = net.a.refused(&["cleanup"])?;
            let named = [7000, 7001]
                .iter()
                .all(|port| said.contains(&server(*port).to_string()));
            ensure!(named && said.contains("no session with the peer"), "{said}");
            net.b.start()?;
            net.wait_established()?;
            for (port, talk) in [7000, 7001].into_iter().zip(talks) {
                talk.advance(256 << 10)?;
                ensure!(net.a.bumps(port)? == ["scramble"]);
                talk.finish()?;
            }
            Ok(())
        })
    });
}

#[test]
fn enable_without_a_session_is_refused_and_changes_nothing() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            net.a.start()?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            let before = states(net)?;
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(
                said.contains("no session") && said.contains("server"),
                "{said}"
            );
            expect_same(&before, &states(net)?)?;
            ensure!(net.a.bumps(7000)? == ["plain"]);
            talk.advance(256 << 10)?;
            talk.finish()
        })
    });
}

#[test]
fn enable_of_nothing_is_refused() {
    isolated(|| {
        Setup::new().run(|net| {
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(said.contains("no live connection"), "{said}");
            Ok(())
        })
    });
}

#[test]
fn what_others_remove_is_put_back_and_nothing_leaks_meanwhile() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;
            ears.from_now();
            let rules = |net: &Net| -> Result<Vec<String>> {
                let listed = net.a.host.run("ip rule")?;
                Ok(listed.lines().map(str::to_owned).collect())
            };
            let before = rules(net)?;
            let ours = "ip rule del fwmark 0x1000000/0xf000000";
            net.a.host.run(ours)?;
            wait("the rule to be back", || {
                rules(net).is_ok_and(|now| now == before)
            })?;
            talk.advance(1 << 20)?;
            talk.finish_unheard(ears, 2 << 20)
        })
    });
}

#[test]
fn the_loss_of_all_conntrack_entries_lets_nothing_out_in_plain() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;
            ears.from_now();
            for node in [&net.a, &net.b] {
                node.host.run("conntrack -F")?;
                talk.advance(1 << 20)?;
            }
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 4 << 20)
        })
    });
}

#[test]
fn a_connection_of_the_peers_rule_stays_on_its_bump() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"scramble\"\ndport = 7000")
            .run(|net| {
                let talk = net.talk(7000)?;
                talk.advance(256 << 10)?;
                net.wait_bump(7000, "scramble")?;
                let said = net.b.refused(&["disable", "--sport", "7000"])?;
                ensure!(said.contains("a rule of the peer"), "{said}");
                net.wait_bump(7000, "scramble")?;
                talk.advance(256 << 10)?;
                talk.finish()
            })
    });
}

/// The rule of the kernel that keeps a chosen connection on its bump without an entry of conntrack is of the bump
/// that was chosen last.
#[test]
fn what_stands_in_for_a_lost_entry_follows_the_choice() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = [net.talk(7000)?, net.talk(7001)?];
            let stands = |node: &Node, port: &str, bump: u8| {
                let what = format!("a rule for {port} on bump {bump}");
                wait(&what, || {
                    let rules = node.host.run("iptables-save -t mangle").unwrap_or_default();
                    let target = format!("-g DIBS-SET-{bump}");
                    rules
                        .lines()
                        .any(|rule| rule.contains(port) && rule.ends_with(&target))
                })
            };
            net.a.put_on("scramble", "--dport", 7000)?;
            net.a.put_on("seal", "--dport", 7001)?;
            let [at_a, at_b] = ["--dport 7000", "--sport 7000"];
            stands(&net.a, at_a, 1)?;
            stands(&net.b, at_b, 1)?;
            // Both bumps are there already, so nothing else changes.
            net.a.put_on("seal", "--dport", 7000)?;
            stands(&net.a, at_a, 3)?;
            stands(&net.b, at_b, 3)?;
            // And that it changed is nobody else's doing.
            for node in [&net.a, &net.b] {
                let restored = node.counter("steering_restored")?;
                ensure!(restored == 0, "put back: {restored}");
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}
