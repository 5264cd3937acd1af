//! After an outage a connection goes on at once, and not when TCP would try again by itself.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dibs_lab::{End, Host, wait_until};
use netns_tests::kernel::too_old;
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;

/// TCP doubles its timeouts: after so long it tries again ten seconds later.
const OUTAGE: Duration = Duration::from_secs(15);
/// After so long it does so some seconds later.
const SHORT: Duration = Duration::from_secs(6);
/// What going on may take, the start of a daemon included. It takes a quarter of that, or half beside other load.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Kills daemons, and starts them again after the outage.
fn outlives_a_crash(ends: impl Fn(&mut Net) -> Vec<&mut Node>) -> Result<()> {
    under_outages(|net, talk| {
        let kill = |net: &mut Net| {
            { ends(net).into_iter() }.try_for_each(|node| node.stop(Signal::SIGKILL))
        };
        let start = |net: &mut Net| ends(net).into_iter().try_for_each(Node::spawn);
        outlives(net, talk, OUTAGE, kill, start)
    })
}

/// Segments that the kernels dropped for their time stamps.
fn dropped(net: &Net) -> Result<u64> {
    Ok(too_old(&net.a.host)? + too_old(&net.b.host)?)
}

/// Nobody answers the connection from `begin` to `end`; it stands still, and then goes on at once.
fn outlives(
    net: &mut Net,
    talk: &Talk,
    time: Duration,
    begin: impl FnOnce(&mut Net) -> Result<()>,
    end: impl FnOnce(&mut Net) -> Result<()>,
) -> Result<()> {
    begin(net)?;
    talk.stands_still(time)?;
    let before = talk.received();
    let since = Instant::now();
    end(net)?;
    goes_on(talk, before, since)?;
    net.wait_established()?;
    talk.advance(SETTLED)
}

/// Runs outages on one connection: it loses nothing, stays on the bump, and is never in plain.
fn under_outages(outages: impl FnOnce(&mut Net, &Talk) -> Result<()>) -> Result<()> {
    Setup::new().run(|net| {
        let mut ears = net.eavesdrop()?;
        let talk = net.bumped()?;
        let dropped_before = dropped(net)?;
        ears.from_now();
        outages(net, &talk)?;
        net.wait_bump(7000, "scramble")?;
        let dropped = dropped(net)? - dropped_before;
        ensure!(dropped == 0, "{dropped} segments with old time stamps");
        let plaintexts = talk.plaintexts;
        talk.finish()?;
        ears.heard_nothing(&plaintexts, 4 << 20)
    })
}

/// Has both hosts drop what comes in by a link, or no longer.
fn swallow(net: &Net, command: &str, interface: &str) -> Result<()> {
    for node in [&net.a, &net.b] {
        let drop = format!("iptables -t raw {command} PREROUTING -i {interface} -j DROP");
        node.host.run(&drop)?;
    }
    Ok(())
}

#[test]
fn all_paths_go_and_come_back() {
    isolated(|| {
        under_outages(|net, talk| {
            outlives(
                net,
                talk,
                SHORT,
                |net| net.eth.down(End::B).and(net.wlan.down(End::A)),
                |net| net.wlan.up(End::A).and(net.eth.up(End::B)),
            )?;
            for round in 0..12 {
                let link = [&net.eth, &net.eth, &net.wlan][round % 3];
                let end = End::BOTH[round % 2];
                link.down(end)?;
                link.up(end)?;
                talk.advance(64 << 10)?;
            }
            net.wait_established()?;
            talk.advance(1 << 20)
        })
    });
}

#[test]
fn only_the_untrusted_path_is_left() {
    isolated(|| {
        under_outages(|net, talk| {
            swallow(net, "-I", "eth0")?;
            // Until both have noticed.
            talk.stands_still(Duration::from_secs(1))?;
            let passed = |net: &Net| -> Result<u64> {
                let seen = net.b.host.counters("wlan0")?;
                Ok(seen.rx_bytes + seen.tx_bytes)
            };
            let before = passed(net)?;
            let end = |net: &mut Net| {
                // Probes and their answers, where data would be megabytes.
                let bytes = passed(net)? - before;
                ensure!(bytes < 64 << 10, "{bytes} bytes by the untrusted path");
                swallow(net, "-D", "eth0")
            };
            outlives(net, talk, SHORT, |_| Ok(()), end)
        })
    });
}

#[test]
fn daemons_are_suspended() {
    isolated(|| {
        under_outages(|net, talk| {
            outlives(net, talk, SHORT, |net| net.a.suspend(), |net| net.a.go_on())?;
            outlives(
                net,
                talk,
                Duration::from_secs(2),
                |net| net.a.suspend().and(net.b.suspend()),
                |net| net.b.go_on().and(net.a.go_on()),
            )
        })
    });
}

/// Bytes arrive in both directions soon after `since`, and more than may have waited in a queue.
fn goes_on(talk: &Talk, before: [u64; 2], since: Instant) -> Result<()> {
    let first = talk.moves_after(before, since, AT_ONCE)?;
    let left = AT_ONCE.saturating_sub(since.elapsed());
    let advanced = talk.advance_within(256 << 10, left);
    let many = since.elapsed();
    println!("first bytes after the outage: {first:?}, many: {many:?}");
    advanced
}

#[test]
fn the_calling_daemon_is_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.a]));
}

#[test]
fn the_called_daemon_is_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.b]));
}

#[test]
fn both_daemons_are_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.a, &mut net.b]));
}

/// Whether the host's TCP tries again ten seconds from now or later.
fn waits_long(host: &Host) -> Result<bool> {
    let sockets = host.run("ss -tin sport = :7000 or dport = :7000")?;
    let value = |name: &str| {
        let words = &mut sockets.split_ascii_whitespace();
        let value = words.find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok());
        value.unwrap_or_default()
    };
    // Milliseconds.
    Ok(value("backoff:") > 0 && value("rto:") > value("lastsnd:") + 10_000)
}

/// Only what was received and never acknowledged can be told to a kernel: whose packets were lost themselves
/// waits for its own timeout, whatever it hears.
#[test]
fn whose_acknowledgements_were_lost_in_plain_goes_on_at_once_on_a_bump() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(SETTLED)?;
            let drop = "iptables -t raw -I PREROUTING -i eth0 -p tcp -j DROP";
            net.a.host.run(drop)?;
            wait_until(OUTAGE * 3, "a long timeout", || {
                waits_long(&net.a.host).unwrap_or_default()
            })?;
            let ([before, _], since) = (talk.received(), Instant::now());
            net.a.enable(7000)?;
            let left = Duration::from_secs(5).saturating_sub(since.elapsed());
            wait_until(
                left,
                "new bytes of whose acknowledgements were lost",
                || talk.received()[0] > before,
            )?;
            talk.advance_within(SETTLED, OUTAGE * 2)?;
            talk.finish()
        })
    });
}

/// What waits for a path that is away keeps nothing waiting that needs it not, however much of that there is.
fn others_go_on(bump: &str, path: &str) -> Result<()> {
    Setup::new().run(|net| {
        let waits = net.talk(7000)?;
        net.a.put_on(bump, "--dport", 7000)?;
        let goes_on = net.talk(7001)?;
        net.a.put_on("seal", "--dport", 7001)?;
        waits.advance(SETTLED)?;
        swallow(net, "-I", path)?;
        waits.stands_still(Duration::from_secs(1))?;
        // More than a peer holds.
        goes_on.advance(36 << 20)?;
        swallow(net, "-D", path)?;
        waits.advance(SETTLED)?;
        goes_on.finish()?;
        waits.finish()
    })
}

#[test]
fn shares_that_wait_hold_up_nothing_else() {
    isolated(|| others_go_on("share", "wlan0"));
}

#[test]
fn what_waits_for_a_trusted_path_holds_up_nothing_else() {
    isolated(|| others_go_on("scramble", "eth0"));
}
