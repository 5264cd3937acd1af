//! Connections that a rule requires to go by a bump: never in plain, in no moment.

use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::End;
use netns_tests::daemon::wait;
use netns_tests::eavesdropper::is_tcp;
use netns_tests::homes::Homes;
use netns_tests::routed::exchange;
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::Talk;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

const RULE: &str = "bump = \"scramble\"\ndport = 7000\nrequire = true";

/// A rule made with `dibsctl`, by its number.
fn add(net: &Net, selector: &[&str]) -> Result<String> {
    let bump = ["--bump", "scramble", "--require"];
    let made = net
        .a
        .ctl(&[&["rule", "add"], selector, &bump[..]].concat())?;
    ensure!(made["require"] == true, "{made:#}");
    Ok(made["id"].to_string())
}

#[test]
fn not_a_byte_is_plain_over_a_whole_life() {
    isolated(|| {
        Setup::new().rule(RULE).without_daemons().run(|net| {
            let ears = net.eavesdrop()?;
            // Or the kernel forgets IPv6 addresses with the link.
            net.a
                .host
                .sysctl("net.ipv6.conf.eth0.keep_addr_on_down", "1")?;
            net.a.start()?;
            // No session yet: nothing leaves at all.
            let early = net.a.host.in_ns(|| {
                TcpStream::connect_timeout(&server(7000), Duration::from_secs(1)).map(drop)
            });
            ensure!(early.is_err(), "connected without a session");
            net.b.start()?;
            net.wait_established()?;

            let talks =
                [server(7000), server_v6(7000)].map(|to| Talk::start(&net.a.host, &net.b.host, to));
            let talks = talks.into_iter().collect::<Result<Vec<_>>>()?;
            let advance =
                |bytes| -> Result<()> { talks.iter().try_for_each(|talk| talk.advance(bytes)) };
            advance(1 << 20)?;
            net.a.stop(Signal::SIGKILL)?;
            talks[0].stands_still(Duration::from_secs(1))?;
            net.a.start()?;
            net.wait_established()?;
            advance(1 << 20)?;
            net.eth.down(End::A)?;
            talks[0].stands_still(Duration::from_secs(1))?;
            net.eth.up(End::A)?;
            advance(1 << 20)?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            net.wait_established()?;
            advance(1 << 20)?;

            let plaintexts: Vec<_> = talks.iter().flat_map(|talk| talk.plaintexts).collect();
            talks.into_iter().try_for_each(Talk::finish)?;
            let heard = ears.finish()?;
            for (link, recording) in [("eth", &heard.eth), ("wlan", &heard.wlan)] {
                let tcp = recording
                    .packets
                    .iter()
                    .filter(|packet| is_tcp(&packet.frame));
                ensure!(tcp.count() == 0, "TCP in plain on {link}");
                let bytes: usize = recording.packets.iter().map(|p| p.frame.len()).sum();
                ensure!(bytes > 2 << 20, "{bytes} bytes on {link}");
            }
            let always = std::time::UNIX_EPOCH..std::time::SystemTime::now();
            ensure!(heard.plain(&plaintexts, &always) == [0, 0], "in plain");
            Ok(())
        })
    });
}

#[test]
fn neither_end_can_take_it_off_but_by_deleting_the_rule() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            // Chosen to be plain, by either end: the rule stands above it.
            net.a.enable(7000)?;
            net.b.switch("disable", "--sport", 7000)?;
            net.wait_bump(7000, "plain")?;
            let id = add(net, &["--dport", "7000"])?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;

            let mut ears = net.eavesdrop()?;
            ears.from_now();
            let said = net.a.refused(&["disable", "--dport", "7000"])?;
            ensure!(
                said.contains(&format!(
                    "rule {id} requires scramble: delete the rule first"
                )),
                "{said}"
            );
            let said = net.b.refused(&["disable", "--sport", "7000"])?;
            ensure!(said.contains("a rule of the peer"), "{said}");
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;
            ears.heard_nothing(&talk.plaintexts, 2 << 20)?;

            net.a.ctl(&["rule", "del", &id])?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            talk.advance(256 << 10)?;
            talk.finish()
        })
    });
}

#[test]
fn it_outlives_the_daemon_and_takes_nothing_in_plain() {
    isolated(|| {
        Setup::new().run(|net| {
            // Connections that the far end begins, too.
            let id = add(net, &["--sport", "7000"])?;
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            let rules = net.a.ctl(&["rule", "list"])?;
            let rule = &rules[0];
            let known = rule["id"].to_string();
            ensure!(known == id && rule["require"] == true, "{rules:#}");
            let local = "10.0.1.1:7000".parse()?;
            let listener = net.a.host.in_ns(|| std::net::TcpListener::bind(local))?;
            listener.set_nonblocking(true)?;
            let before = net.a.counter("plain_in_required")?;
            let plain = net
                .b
                .host
                .in_ns(|| TcpStream::connect_timeout(&local, Duration::from_secs(2)).map(drop));
            ensure!(plain.is_err() && listener.accept().is_err(), "let in");
            ensure!(net.a.counter("plain_in_required")? > before, "not counted");
            // With a rule of its own the far end comes by the bump.
            net.b
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "scramble"])?;
            drop(listener);
            let ears = net.eavesdrop()?;
            let talk = Talk::start(&net.b.host, &net.a.host, local)?;
            talk.advance(1 << 20)?;
            talk.finish_unheard(ears, 2 << 20)
        })
    });
}

#[test]
fn without_a_session_what_is_there_waits() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            net.a.start()?;
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            add(net, &["--dport", "7000"])?;
            talk.stands_still(Duration::from_secs(1))?;
            net.b.start()?;
            net.wait_established()?;
            talk.advance(1 << 20)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish()
        })
    });
}

#[test]
fn what_would_let_it_out_is_refused() {
    isolated(|| {
        for (key, kept) in [
            ("fail = \"open\"", "fail = \"closed\""),
            (
                "on_trusted_down = \"untrusted\"",
                "on_trusted_down = \"hold\"",
            ),
            ("integrity = \"off\"", "integrity = \"on\""),
        ] {
            Setup::new()
                .key(key)
                .rule(RULE)
                .without_daemons()
                .run(|net| {
                    net.a.spawn()?;
                    let said = net.a.refusal()?;
                    let file = std::fs::read_to_string(net.a.directory().join("dibsd.toml"))?;
                    let line = file
                        .lines()
                        .position(|line| line.starts_with("require"))
                        .context("the rule")?;
                    for part in [
                        format!("/run/dibs/dibsd.toml:{}:11: ", line + 1),
                        format!("require does not work with {key}; hint: set {kept}"),
                    ] {
                        ensure!(said.contains(&part), "no {part:?}: {said}");
                    }
                    // Nor can a rule be made when it runs.
                    net.b.start()?;
                    let rule = ["rule", "add", "--all", "--bump", "scramble", "--require"];
                    let said = net.b.refused(&rule)?;
                    ensure!(said.contains(kept), "{said}");
                    wait("no rule", || {
                        net.b
                            .ctl(&["rule", "list"])
                            .is_ok_and(|rules| rules.as_array().is_some_and(Vec::is_empty))
                    })
                })?;
        }
        Ok(())
    });
}

/// Neither host shows anything in plain of what a rule of one requires on its bump, however much goes by the bump; nor is the way back
/// lost by that.
#[test]
fn what_either_host_requires_is_not_shown_in_plain() {
    const SOME: usize = 200_000;
    isolated(|| {
        Homes::run(|net| {
            net.internet.shell(
                "nft add table ip seen\n\
                 nft 'add chain ip seen forward { type filter hook forward priority -10; }'\n\
                 nft add counter ip seen plain\n\
                 nft add rule ip seen forward tcp sport 7000 counter name plain\n\
                 nft add rule ip seen forward tcp dport 7000 counter name plain",
            )?;
            let shown = || net.internet.run("nft reset counter ip seen plain");
            let is_hidden = |shown: &str| shown.contains("packets 0 bytes 0");
            let laptop = &net.laptops[0];
            let rulers = [(laptop, "--dport"), (&net.b, "--sport")];
            for (port, rulers) in (40_000..).zip([&rulers[..1], &rulers[1..], &rulers[..]]) {
                let mut conn = net.connect(0, port, 7000)?;
                laptop.put_on("seal", "--dport", 7000)?;
                laptop.wait_locked(7000)?;
                // Both hosts show it until then.
                (0..10).try_for_each(|_| exchange(&mut conn, SOME))?;
                wait("shadows in plain", || {
                    shown().is_ok_and(|shown| !is_hidden(&shown))
                })?;
                let mut rules = Vec::new();
                for (node, end) in rulers {
                    let rule = ["rule", "add", end, "7000", "--bump", "seal", "--require"];
                    rules.push((node, node.ctl(&rule)?["id"].to_string()));
                }
                wait("nothing in plain", || {
                    let mut some = (0..10).map(|_| exchange(&mut conn, SOME));
                    let moved = shown().and_then(|_| some.try_for_each(|moved| moved));
                    let shown = moved.and_then(|()| shown());
                    shown.is_ok_and(|shown| is_hidden(&shown))
                })?;
                for _ in 0..50_000_000 / SOME {
                    exchange(&mut conn, SOME)?;
                }
                let seen = shown()?;
                ensure!(is_hidden(&seen), "{seen}");
                for (node, id) in rules {
                    node.ctl(&["rule", "del", &id])?;
                }
                laptop.put_on("plain", "--dport", 7000)?;
                exchange(&mut conn, SOME)?;
            }
            Ok(())
        })
    });
}
