//! What is in the kernel before the daemon runs, and what its start and restart change.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::HANG;
use netns_tests::daemon::{SOON, wait};
use netns_tests::topology::server;
use netns_tests::{Net, Setup, isolated, kernel, programs};
use nix::sys::signal::Signal;

const RULE: &str = "bump = \"scramble\"\ndport = 7000";
/// How long somebody tries to connect who is not to succeed.
pub(crate) const IN_VAIN: Duration = Duration::from_secs(2);

/// All rules of the firewall with their handles, and the packets that they counted in all.
fn firewall(net: &Net) -> Result<(Vec<String>, u64)> {
    let listed = net.a.host.run("nft -a list ruleset")?;
    let mut packets = 0;
    let mut rules = Vec::new();
    for line in listed.lines() {
        // `counter packets N bytes N`
        let mut words: Vec<&str> = line.split_ascii_whitespace().collect();
        while let Some(at) = words.iter().position(|word| *word == "counter") {
            let count: Option<u64> = words.get(at + 2).and_then(|word| word.parse().ok());
            packets += count.with_context(|| format!("no count: {line}"))?;
            words.drain(at..at + 5);
        }
        rules.push(words.join(" "));
    }
    Ok((rules, packets))
}

#[test]
fn a_restart_changes_nothing_that_is_right() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            let chosen = net.talk(7001)?;
            net.a.enable(7001)?;
            net.wait_bump(7000, "scramble")?;
            net.wait_bump(7001, "scramble")?;
            // A chosen connection gets a rule of its own some time later.
            wait("the rule of the chosen connection", || {
                let rules = net.a.host.run("iptables-save");
                rules.is_ok_and(|rules| rules.contains("dibs-rule-0"))
            })?;
            net.wait_locked(7000)?;
            net.wait_locked(7001)?;
            talk.advance(256 << 10)?;
            let before = (kernel::state(&net.a.host)?, firewall(net)?);
            let mut monitor = net.a.host.command("ip");
            monitor.args(["-4", "monitor", "rule"]);
            let monitor = net.a.host.spawn(monitor)?;
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            talk.advance(256 << 10)?;
            chosen.advance(256 << 10)?;
            let after = (kernel::state(&net.a.host)?, firewall(net)?);
            let only = |a: &[String], b: &[String]| -> Vec<String> {
                a.iter().filter(|line| !b.contains(line)).cloned().collect()
            };
            // What went with the TUN is there again.
            let state = [only(&before.0, &after.0), only(&after.0, &before.0)];
            ensure!(state.concat().is_empty(), "{state:#?}");
            // The firewall was not even written anew.
            let ((rules, counted), (rules_after, counted_after)) = (before.1, after.1);
            let rules = [only(&rules, &rules_after), only(&rules_after, &rules)];
            ensure!(rules.concat().is_empty(), "{rules:#?}");
            ensure!(counted_after >= counted, "{counted_after} after {counted}");
            ensure!(monitor.stdout().is_empty(), "{}", monitor.stdout());
            talk.finish()?;
            chosen.finish()
        })
    });
}

#[test]
fn a_second_daemon_with_another_socket_changes_nothing() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            net.wait_locked(7000)?;
            let before = (kernel::state(&net.a.host)?, firewall(net)?.0);
            let directory = net.a.directory();
            let config = std::fs::read_to_string(directory.join("dibsd.toml"))?;
            let other = "[daemon]\ncontrol_socket = \"/run/dibs/other.sock\"";
            std::fs::write(
                directory.join("other.toml"),
                config.replacen("[daemon]", other, 1),
            )?;
            let mut second = net.a.host.command(programs::built("dibsd"));
            second.args(["--config", "/run/dibs/other.toml"]);
            let mut second = net.a.host.spawn(second)?;
            ensure!(!second.wait(SOON)?.success(), "two daemons run");
            let said = second.stderr();
            let expected = "another dibsd steers this network namespace";
            ensure!(said.contains(expected), "{said}");
            let after = (kernel::state(&net.a.host)?, firewall(net)?.0);
            ensure!(before == after, "{before:#?}\n{after:#?}");
            ensure!(
                !net.a.log().contains("changed rules or routes of dibs"),
                "put back"
            );
            talk.advance(256 << 10)?;
            talk.finish()
        })
    });
}

#[test]
fn nothing_enabled_tracks_no_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            for node in [&net.a, &net.b] {
                let tracked = node.host.run("conntrack -C")?;
                ensure!(tracked.trim() == "0", "{tracked} connections are tracked");
            }
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            let tracked = net.a.host.run("conntrack -C")?;
            ensure!(
                tracked.trim() != "0",
                "the bump's connection is not tracked"
            );
            talk.finish()
        })
    });
}

/// Runs `dibsd --guard` on `a`, to its end.
pub(crate) fn guard(net: &Net) -> Result<()> {
    let mut guard = net.a.host.command(programs::built("dibsd"));
    guard.args(["--guard", "--config", "/run/dibs/dibsd.toml"]);
    net.a.host.run_within(SOON, guard).map(drop)
}

/// Whether `a` gets a connection to this port of `b` within a time.
pub(crate) fn connects(net: &Net, port: u16, patience: Duration) -> Result<bool> {
    let _listener = net.b.host.in_ns(|| TcpListener::bind(server(port)))?;
    let connected = net
        .a
        .host
        .in_ns(|| TcpStream::connect_timeout(&server(port), patience));
    Ok(connected.is_ok())
}

#[test]
fn the_guard_blocks_what_needs_a_bump_until_the_daemon_runs() {
    isolated(|| {
        Setup::new().rule(RULE).without_daemons().run(|net| {
            let before = kernel::state(&net.a.host)?;
            guard(net)?;
            let ears = net.eavesdrop()?;
            ensure!(!connects(net, 7000, IN_VAIN)?, "what needs a bump passed");
            ensure!(connects(net, 7001, HANG)?, "what needs none was blocked");
            // Whatever is flushed, one layer stands.
            for flush in [
                "ip rule del priority 5200",
                "ip route flush table 5201",
                "iptables -t mangle -F",
            ] {
                net.a.host.run(flush)?;
                ensure!(!connects(net, 7000, IN_VAIN)?, "passed after {flush}");
            }
            guard(net)?;
            net.start()?;
            let talk = net.talk(7000)?;
            talk.advance(2 << 20)?;
            net.wait_bump(7000, "scramble")?;
            let plaintexts = talk.plaintexts;
            talk.finish()?;
            let heard = ears.finish()?;
            let (segments, others) = (heard.segments(7000), heard.segments(7001));
            ensure!(segments == [0, 0], "in plain: {segments:?}");
            ensure!(others[0] > 0, "nothing was heard at all");
            let always = std::time::SystemTime::UNIX_EPOCH..std::time::SystemTime::now();
            ensure!(heard.plain(&plaintexts, &always) == [0, 0], "plaintext");

            net.a.ctl(&["cleanup"])?;
            let after = kernel::state(&net.a.host)?;
            ensure!(before == after, "{before:#?} became {after:#?}");
            Ok(())
        })
    });
}

#[test]
fn the_guard_leaves_what_fails_open_alone() {
    isolated(|| {
        let setup = Setup::new().rule(RULE).key("fail = \"open\"");
        setup.without_daemons().run(|net| {
            let before = kernel::state(&net.a.host)?;
            guard(net)?;
            ensure!(before == kernel::state(&net.a.host)?);
            ensure!(connects(net, 7000, HANG)?, "it was blocked");
            Ok(())
        })
    });
}

#[test]
fn no_flush_gets_past_a_daemon_that_is_dead() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;
            let ears = net.eavesdrop()?;
            net.a.stop(Signal::SIGKILL)?;
            for flush in [
                "ip rule del priority 5200",
                "iptables -t mangle -F",
                "conntrack -F",
            ] {
                net.a.host.run(flush)?;
                talk.stands_still(Duration::from_secs(1))?;
            }
            net.a.start()?;
            net.wait_established()?;
            talk.advance(2 << 20)?;
            talk.finish_unheard(ears, 2 << 20)
        })
    });
}
