//! After an outage a connection goes on at once, and not when TCP would try again by itself.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use dibs_lab::End;
use dibs_netns::{HANG, Host, wait_until};
use netns_tests::daemon::wait;
use netns_tests::kernel::{counted, too_old};
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;

/// Seconds that the kernels' own next attempts are away when an outage ends: TCP doubles its timeouts, so that this
/// comes about. A machine that needs as long for the little that then happens cannot tell who made the connection go on,
/// and tries another outage, with more time.
const AWAY: [f64; 3] = [5.0, 12.0, 40.0];

/// Kills daemons, and starts them again after the outage.
fn outlives_a_crash(ends: impl Fn(&mut Net) -> Vec<&mut Node>) -> Result<()> {
    under_outages(|net, talk| {
        let kill = |net: &mut Net| {
            { ends(net).into_iter() }.try_for_each(|node| node.stop(Signal::SIGKILL))
        };
        let start = |net: &mut Net| ends(net).into_iter().try_for_each(|node| node.spawn());
        outlives(net, talk, kill, start)
    })
}

/// Segments that the kernels dropped for their time stamps.
fn dropped(net: &Net) -> Result<u64> {
    Ok(too_old(&net.a.host)? + too_old(&net.b.host)?)
}

/// Nobody answers the connection from `begin` to `end`; it stands still, and then goes on before its kernels try
/// again by themselves.
fn outlives(
    net: &mut Net,
    talk: &Talk,
    begin: impl Fn(&mut Net) -> Result<()>,
    end: impl Fn(&mut Net) -> Result<()>,
) -> Result<()> {
    let mut tries = [0; 2];
    for away in AWAY {
        begin(net)?;
        wait("TCP to wait for long at both ends", || {
            let waits = |host: &Host| next_try(host).is_ok_and(|next| next > away);
            waits(&net.a.host) && waits(&net.b.host)
        })?;
        let (before, tried) = (talk.received(), timeouts(net)?);
        end(net)?;
        tries = goes_on(net, talk, before, tried)?;
        talk.advance(256 << 10)?;
        net.wait_established()?;
        talk.advance(SETTLED)?;
        if tries == [0; 2] {
            return Ok(());
        }
    }
    bail!("TCP tried again by itself: {tries:?} times");
}

/// How often the timers of the hosts' TCP have run out, to send again or to probe: of `a`, of `b`.
fn timeouts(net: &Net) -> Result<[u64; 2]> {
    let of = |host: &Host| -> Result<u64> {
        Ok(counted(host, "TCPTimeouts")? + counted(host, "TCPWinProbe")?)
    };
    Ok([of(&net.a.host)?, of(&net.b.host)?])
}

/// Waits until new bytes arrive in both directions; returns how often the timer of their sender had run out by then.
fn goes_on(net: &Net, talk: &Talk, before: [u64; 2], tried: [u64; 2]) -> Result<[u64; 2]> {
    let mut moved = [None; 2];
    wait_until(HANG, "new bytes each way", || {
        let Ok(tries) = timeouts(net) else {
            return false;
        };
        let received = talk.received();
        // Of `a`, and of `b`, like the timeouts.
        for (at, moved) in moved.iter_mut().enumerate() {
            if moved.is_none() && received[at] > before[at] {
                *moved = Some(tries[at] - tried[at]);
            }
        }
        moved.iter().all(Option::is_some)
    })
    .with_context(|| format!("received {before:?}, then {:?}", talk.received()))?;
    Ok(moved.map(Option::unwrap_or_default))
}

/// Runs outages on one connection: it loses nothing, stays on the bump, and is never in plain.
fn under_outages(outages: impl FnOnce(&mut Net, &Talk) -> Result<()>) -> Result<()> {
    Setup::new().run(|net| {
        let mut ears = net.eavesdrop()?;
        let talk = net.bumped()?;
        let dropped_before = dropped(net)?;
        ears.from_now();
        outages(net, &talk)?;
        talk.advance(2 << 20)?;
        net.wait_bump(7000, "scramble")?;
        let dropped = dropped(net)? - dropped_before;
        ensure!(dropped == 0, "{dropped} segments with old time stamps");
        talk.finish_unheard(ears, 4 << 20)
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
            let passed = |net: &Net| -> Result<u64> {
                let seen = net.b.host.counters("wlan0")?;
                Ok(seen.rx_bytes + seen.tx_bytes)
            };
            let before = Cell::new(0);
            let begin = |net: &mut Net| {
                swallow(net, "-I", "eth0")?;
                // Until both have noticed.
                talk.stands_still(Duration::from_secs(1))?;
                before.set(passed(net)?);
                Ok(())
            };
            let end = |net: &mut Net| {
                // Probes and their answers, where data would be megabytes.
                let bytes = passed(net)? - before.get();
                ensure!(bytes < 64 << 10, "{bytes} bytes by the untrusted path");
                swallow(net, "-D", "eth0")
            };
            outlives(net, talk, begin, end)
        })
    });
}

#[test]
fn daemons_are_suspended() {
    isolated(|| {
        under_outages(|net, talk| {
            outlives(net, talk, |net| net.a.suspend(), |net| net.a.go_on())?;
            outlives(
                net,
                talk,
                |net| net.a.suspend().and(net.b.suspend()),
                |net| net.b.go_on().and(net.a.go_on()),
            )
        })
    });
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

/// In how many seconds the host's TCP tries again: to send what is not acknowledged, or, where all is and nothing more
/// could be sent, to probe.
fn next_try(host: &Host) -> Result<f64> {
    let sockets = host.run("ss -Htno sport = :7000 or dport = :7000")?;
    // timer:(on,41sec,8), or (persist,...)
    let timer = sockets.split_once("timer:(").map(|(_, timer)| timer);
    let mut fields = timer.unwrap_or_default().split(',');
    let runs = ["on", "persist"].contains(&fields.next().unwrap_or_default());
    let time = fields.next().filter(|_| runs).context("no timer")?;
    seconds(time).with_context(|| time.to_owned())
}

/// A time as ss(8) prints it: 1min2sec, 41sec, 8.788ms, which are seconds, or 788ms.
fn seconds(time: &str) -> Option<f64> {
    if let Some(short) = time.strip_suffix("ms") {
        let number: f64 = short.parse().ok()?;
        return Some(if short.contains('.') {
            number
        } else {
            number / 1e3
        });
    }
    let (minutes, rest) = time.split_once("min").unwrap_or(("0", time));
    let rest = rest.strip_suffix("sec").unwrap_or(rest);
    let number = |digits: &str| match digits {
        "" => Some(0.0),
        _ => digits.parse::<f64>().ok(),
    };
    Some(number(minutes)? * 60.0 + number(rest)?)
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
            wait("a long timeout", || {
                next_try(&net.a.host).is_ok_and(|next| next > 12.0)
            })?;
            let [before, _] = talk.received();
            net.a.enable(7000)?;
            // Before TCP tries again by itself, 12 s after that answer of ss.
            let what = "new bytes of whose acknowledgements were lost";
            wait_until(Duration::from_secs(8), what, || talk.received()[0] > before)?;
            talk.advance(SETTLED)?;
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
