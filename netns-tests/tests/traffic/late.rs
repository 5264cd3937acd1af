//! Authentic datagrams that come long after others: of an older choice, an older epoch, an older session.

use std::net::SocketAddrV4;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use dibs_netns::Host;
use netns_tests::attacker::{Attacker, datagrams};
use netns_tests::daemon::wait;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

/// Keeps what the daemon of `a` sends on the trusted link from `b`, or no longer.
fn withhold(net: &Net, command: &str) -> Result<()> {
    let rule = "PREROUTING -i eth0 -s 10.0.1.1 -p udp -j DROP";
    let rule = format!("iptables -t raw {command} {rule}");
    net.b.host.run(&rule).map(drop)
}

/// What `a` sends on the trusted link, and somebody there keeps back, from when `meanwhile` begins until it
/// is suspect there: not for so long that `a` gives up.
fn withheld(
    net: &Net,
    to: SocketAddrV4,
    meanwhile: impl FnOnce() -> Result<()> + Send,
) -> Result<Vec<Vec<u8>>> {
    let ears = Capture::start(attacker(net)?, "near0")?;
    // The first of them still pass; those behind them do not.
    let since = SystemTime::now();
    let suspected = || {
        net.a
            .log()
            .matches("path eth to peer server is suspect")
            .count()
    };
    let before = suspected();
    withhold(net, "-I")?;
    let mut heard = std::thread::scope(|scope| {
        let meanwhile = scope.spawn(meanwhile);
        let enough = wait("the path to be suspect", || suspected() > before);
        let heard = ears.finish();
        withhold(net, "-D")?;
        meanwhile.join().expect("no panic")?;
        enough.and(heard)
    })?;
    heard.packets.retain(|packet| packet.at > since);
    let heard = datagrams(&heard, to);
    ensure!(!heard.is_empty(), "nothing was sent");
    Ok(heard)
}

/// The same, with data among it: of what is sent at a moment, there may be none on this link.
fn withheld_data(net: &Net, to: SocketAddrV4) -> Result<Vec<Vec<u8>>> {
    let mut heard = Vec::new();
    wait("data", || {
        net.a
            .wait_path("eth", "up")
            .and_then(|()| withheld(net, to, || Ok(())))
            .is_ok_and(|now| {
                heard = now;
                heard.iter().any(|datagram| datagram.len() > 1000)
            })
    })?;
    Ok(heard)
}

fn attacker(net: &Net) -> Result<&Host> {
    net.attacker.as_ref().context("a host in the link")
}

#[test]
fn of_an_older_choice_or_an_older_session() {
    isolated(|| {
        Setup::new().attacked("eth0").run(|net| {
            let (a, b) = ("10.0.1.1:5300".parse()?, "10.0.1.2:5300".parse()?);
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            let sender = Attacker::on(attacker(net)?)?;
            // Every one of them arrives: some get lost beside the talk, so they are sent until as many are
            // counted. What was taken the first time is known the next time.
            let send = |net: &Net, datagrams: &[Vec<u8>], counter: &str| -> Result<()> {
                let before = net.b.counter(counter)?;
                wait(counter, || {
                    let sent = datagrams.iter().all(|d| sender.send(a, b, d).is_ok());
                    let counted = net.b.counter(counter).map(|now| now - before);
                    sent && counted.is_ok_and(|n| n as usize >= 2 * datagrams.len())
                })?;
                talk.advance(1 << 20)
            };

            // Data, once the connection is in plain.
            let data = withheld_data(net, b)?;
            talk.advance(1 << 20)?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            send(net, &data, "datagram_replayed")?;
            net.wait_bump(7000, "plain")?;

            // The word that it leaves the bump, once it is there again.
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            let words = withheld(net, b, || net.a.disable(7000))?;
            net.wait_bump(7000, "plain")?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            send(net, &words, "datagram_replayed")?;
            net.wait_bump(7000, "scramble")?;

            // All of a session that is over.
            let data = withheld_data(net, b)?;
            net.b.stop(Signal::SIGTERM)?;
            net.b.start()?;
            net.wait_established()?;
            let sessions = net.b.counter("sessions_established")?;
            send(net, &data, "datagram_unknown_index")?;
            ensure!(net.b.counter("sessions_established")? == sessions);
            net.wait_bump(7000, "scramble")?;
            talk.finish()
        })
    });
}
