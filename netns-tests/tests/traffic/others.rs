//! What other programs do to our state in the kernel: put back, told, and nothing in plain meanwhile.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Setup, isolated, kernel};
use nix::sys::signal::Signal;

/// What a host has of the kernel's state, in an order of its own: what is put back may come later in
/// a listing than what was never removed.
fn sorted(net: &Net) -> Result<Vec<String>> {
    let mut state = kernel::state(&net.a.host)?;
    // Connections come and go; sysctls of others' devices are theirs.
    state.retain(|line| {
        let of_others = line.starts_with("sysctl") && !line.contains(".dibs1.");
        !of_others && !line.starts_with("conntrack")
    });
    state.sort();
    Ok(state)
}

/// Runs a line of shell commands.
/// Does harm on `a` under a connection on the bump: it is undone, told and counted, the connection goes
/// on, and nothing of it is ever in plain.
fn put_back(harm: &[&str]) -> Result<()> {
    Setup::new().run(|net| {
        let talk = net.talk(7000)?;
        net.a.enable(7000)?;
        net.wait_bump(7000, "scramble")?;
        talk.advance(SETTLED)?;
        harmed(net, &talk, harm)?;
        talk.finish()
    })
}

fn harmed(net: &Net, talk: &Talk, harm: &[&str]) -> Result<()> {
    let events = net.a.events()?;
    let before = sorted(net)?;
    for harm in harm {
        let ears = net.eavesdrop()?;
        let told = || events.stdout().matches("steering_restored").count();
        let told_before = told();
        let restored = net.a.counter("steering_restored")?;
        net.a.host.shell(harm)?;
        let mut now = Vec::new();
        let back = wait("everything to be put back", || {
            now = sorted(net).unwrap_or_default();
            now == before
        });
        back.with_context(|| {
            let gone: Vec<_> = before.iter().filter(|line| !now.contains(line)).collect();
            let new: Vec<_> = now.iter().filter(|line| !before.contains(line)).collect();
            format!("after {harm}: missing {gone:#?}, too many {new:#?}")
        })?;
        wait("the event", || told() > told_before)
            .with_context(|| format!("after {harm}: {}", events.stdout()))?;
        let counted = net.a.counter("steering_restored")?;
        ensure!(counted > restored, "{harm}: {counted} after {restored}");
        talk.advance(SETTLED)?;
        ears.heard_nothing(&talk.plaintexts, SETTLED as usize)
            .with_context(|| format!("after {harm}"))?;
    }
    Ok(())
}

#[test]
fn firewalls_are_flushed() {
    isolated(|| {
        put_back(&[
            "iptables -t mangle -F",
            "iptables -t mangle -D OUTPUT -j DIBS-OUTPUT",
            "iptables -t mangle -F DIBS-POSTROUTING",
            "iptables -F",
            "nft flush ruleset",
        ])
    });
}

#[test]
fn routing_is_flushed() {
    isolated(|| {
        put_back(&[
            "ip rule del priority 5200",
            "ip route flush table 5201",
            "ip route flush table 5200",
            "ip address flush dev dibs1",
        ])
    });
}

#[test]
fn the_tun_is_changed() {
    isolated(|| {
        put_back(&[
            "sysctl -w net.ipv4.conf.dibs1.rp_filter=1",
            "sysctl -w net.ipv4.conf.dibs1.forwarding=1",
            "tc qdisc replace dev dibs1 root pfifo_fast",
            "ip link set dibs1 mtu 1400",
            "ip link set dibs1 down",
        ])
    });
}

#[test]
fn everything_at_once() {
    isolated(|| {
        let all = "nft flush ruleset; iptables -t mangle -F; ip rule flush; \
                   ip rule add priority 32766 lookup main protocol kernel; \
                   ip rule add priority 32767 lookup default protocol kernel; \
                   ip route flush table 5201; conntrack -F";
        put_back(&[all, all])
    });
}

#[test]
fn while_no_daemon_runs_a_flushed_firewall_lets_nothing_out() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            net.a.stop(Signal::SIGKILL)?;
            let ears = net.eavesdrop()?;
            // The backstop's table has no owner now, and is not of iptables.
            for harm in [
                "iptables -t mangle -F; iptables -F",
                "conntrack -F",
                "ip rule del priority 5200",
                "ip route flush table 5201",
            ] {
                net.a.host.shell(harm)?;
                talk.stands_still(Duration::from_millis(500))
                    .with_context(|| format!("after {harm}"))?;
            }
            ears.heard_nothing(&talk.plaintexts, 0)?;
            net.a.start()?;
            net.wait_established()?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

/// Switches a connection on `a` as docs/switching.md, "Switching by hand", says.
fn by_conntrack(net: &Net, talk: &Talk, mark: &str) -> Result<()> {
    let sport = talk.client.port();
    let update = |ends: &str| format!("conntrack -U -p tcp {ends} --mark {mark}");
    let one = format!("-s 10.0.1.1 -d 10.0.1.2 --sport {sport} --dport 7000");
    // What was there before it was tracked is known from whichever end spoke first.
    let other = format!("-s 10.0.1.2 -d 10.0.1.1 --sport 7000 --dport {sport}");
    let either = format!("{} || {}", update(&one), update(&other));
    net.a.host.shell(&either).map(drop)
}

/// Each command of docs/switching.md, "Switching by hand", word by word but for the addresses.
#[test]
fn plain_commands_switch_a_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            let sport = talk.client.port();
            let one = format!("-p tcp -s 10.0.1.1 -d 10.0.1.2 --sport {sport} --dport 7000");
            let conntrack = |mark: &str| by_conntrack(net, &talk, mark);
            let iptables = |value: &str| -> Result<()> {
                let rule = format!("OUTPUT {one} -j CONNMARK --set-xmark {value}/0x1f000000");
                net.a.host.shell(&format!("iptables -t mangle -A {rule}"))?;
                talk.advance(64 << 10)?;
                net.a
                    .host
                    .shell(&format!("iptables -t mangle -D {rule}"))
                    .map(drop)
            };
            // Connections are tracked while a bump is in use, so iptables has to come first.
            for (by_conntrack, number, bump) in [
                (false, "11", "scramble"),
                (true, "13", "seal"),
                (true, "11", "scramble"),
                (true, "10", "plain"),
                (false, "13", "seal"),
                (false, "10", "plain"),
            ] {
                let value = format!("0x{number}000000");
                match by_conntrack {
                    true => conntrack(&value)?,
                    false => iptables(&value)?,
                }
                net.wait_bump(7000, bump)
                    .with_context(|| format!("{bump}, by conntrack: {by_conntrack}"))?;
                talk.advance(256 << 10)?;
            }
            // dibsctl has the last word.
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

/// The peer has not answered to the first choice when the second is made.
#[test]
fn the_later_of_two_choices_by_hand_stands() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            let events = net.a.events()?;
            for (first, name, second, bump) in [
                ("0x10000000", "plain", "0x13000000", "seal"),
                ("0x13000000", "seal", "0x10000000", "plain"),
            ] {
                // Whatever was chosen before has been answered when this has been.
                net.a.enable(7000)?;
                net.wait_bump(7000, "scramble")?;
                talk.advance(256 << 10)?;
                let told = format!("another program moved a connection to {name}");
                let times = || events.stdout().matches(&told).count();
                let before = times();
                net.b.suspend()?;
                by_conntrack(net, &talk, first)?;
                wait("the first choice", || times() > before)?;
                by_conntrack(net, &talk, second)?;
                net.b.go_on()?;
                net.wait_bump(7000, bump)
                    .with_context(|| format!("{bump} after {name}: {}", events.stdout()))?;
            }
            // dibsctl is later than both.
            by_conntrack(net, &talk, "0x13000000")?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(SETTLED)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish()
        })
    });
}
