//! How the user would have the paths used, on a connection that is under way: the hint, roles, schedulers and
//! volumes, and that they outlive the daemon.

use anyhow::{Context as _, Result, ensure};
use dibs_lab::End;
use netns_tests::daemon::wait;
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Node, Setup, isolated, isolated_with_users};
use nix::sys::signal::Signal;
use serde_json::Value;

/// What is counted of a path while a stream goes on.
const STREAM: u64 = 4 << 20;

/// A connection on seal, of which either path may carry all.
fn sealed(net: &Net) -> Result<Talk> {
    let talk = net.talk(7000)?;
    talk.advance(256 << 10)?;
    net.a.put_on("seal", "--dport", 7000)?;
    net.wait_bump(7000, "seal")?;
    talk.advance(SETTLED)?;
    Ok(talk)
}

fn number(path: &Value, key: &str) -> Result<u64> {
    path[key]
        .as_u64()
        .with_context(|| format!("{key}: {path:#}"))
}

/// What a host sent by its two paths while the stream went on for a while, what was under way left aside.
fn carried(node: &Node, talk: &Talk) -> Result<[u64; 2]> {
    talk.advance(SETTLED)?;
    let sent = || -> Result<[u64; 2]> {
        let of = |name| number(&node.path(name)?, "bytes_sent");
        Ok([of("eth")?, of("wlan")?])
    };
    let before = sent()?;
    talk.advance(STREAM)?;
    let after = sent()?;
    // A path that came anew counts anew.
    Ok([0, 1].map(|path| after[path].saturating_sub(before[path])))
}

/// Waits until a path is unused for this reason, or used: while the peer pauses, it is unanswered.
fn wait_used(node: &Node, path: &str, why: Option<&str>) -> Result<()> {
    wait(&format!("path {path} to be unused: {why:?}"), || {
        node.path(path)
            .is_ok_and(|listed| listed["unused"].as_str() == why)
    })
}

/// All but acknowledgements went by `one` of two.
fn goes_by(one: u64, other: u64) -> Result<()> {
    ensure!(
        one > STREAM / 2 && other < one / 4,
        "{one} bytes by the one, {other} by the other"
    );
    Ok(())
}

#[test]
fn new_data_goes_by_the_preferred_path() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net)?;
            // The other one's round trip is that of an idle link.
            let made = net.a.ctl(&["path", "prefer", "wlan", "--delta", "1000"])?;
            ensure!(made["prefer"]["path"] == "wlan", "{made:#}");
            let [eth, wlan] = carried(&net.a, &talk)?;
            goes_by(wlan, eth)?;
            wait_used(&net.a, "eth", Some("another path is preferred"))?;
            wait_used(&net.a, "wlan", None)?;
            ensure!(net.a.path("wlan")?["preferred"] == true);

            net.a.ctl(&["path", "prefer", "eth", "--delta", "1000"])?;
            let [eth, wlan] = carried(&net.a, &talk)?;
            goes_by(eth, wlan)?;

            net.a.ctl(&["path", "unprefer"])?;
            wait("both paths to carry data", || {
                carried(&net.a, &talk).is_ok_and(|sent| sent.iter().all(|sent| *sent > STREAM / 8))
            })?;
            talk.finish()
        })
    });
}

#[test]
fn a_backup_carries_data_once_the_others_are_gone() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net)?;
            net.a.ctl(&["path", "role", "wlan", "backup"])?;
            let [eth, wlan] = carried(&net.a, &talk)?;
            goes_by(eth, wlan)?;
            wait_used(&net.a, "wlan", Some("it is a backup, and other paths work"))?;
            let listed = net.a.path("wlan")?;
            ensure!(listed["role"] == "backup", "{listed:#}");

            net.eth.down(End::A)?;
            net.a.wait_path("eth", "down")?;
            let [_, wlan] = carried(&net.a, &talk)?;
            ensure!(wlan > STREAM / 2, "{wlan} bytes by the backup");
            wait_used(&net.a, "wlan", None)?;
            net.eth.up(End::A)?;
            net.a.wait_path("eth", "up")?;
            let [eth, wlan] = carried(&net.a, &talk)?;
            goes_by(eth, wlan)?;
            talk.finish()
        })
    });
}

#[test]
fn a_path_that_is_never_used_sends_nothing() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net)?;
            net.a.ctl(&["path", "role", "wlan", "never"])?;
            net.a.wait_path("wlan", "down")?;
            let [_, wlan] = carried(&net.a, &talk)?;
            let listed = net.a.path("wlan")?;
            ensure!(wlan == 0, "{wlan} bytes: {listed:#}");
            for key in ["unused", "reason"] {
                ensure!(listed[key] == "its role is off", "{listed:#}");
            }
            let said = net.a.refused(&["path", "role", "eth", "never"])?;
            ensure!(said.contains("no connection could be protected"), "{said}");
            let said = net.a.refused(&["path", "prefer", "wlan"])?;
            ensure!(said.contains("is off"), "{said}");
            net.a.ctl(&["path", "reset"])?;
            net.wait_established()?;
            let [_, wlan] = carried(&net.a, &talk)?;
            ensure!(wlan > 0, "it came back, and nothing was sent by it");
            talk.finish()
        })
    });
}

/// A volume that is used up stops its path, at the next daemon too, until there is more.
#[test]
fn a_volume_that_is_used_up_stops_its_path() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net)?;
            let events = net.a.events()?;
            let volume = 16_000_000;
            net.a.ctl(&["path", "limit", "wlan", "--volume", "16 MB"])?;
            ensure!(number(&net.a.path("wlan")?, "volume")? == volume);
            wait_used(&net.a, "wlan", Some("its data cap is used up"))?;
            net.a.wait_path("wlan", "down")?;
            let listed = net.a.path("wlan")?;
            let used = number(&listed, "volume_used")?;
            ensure!(used >= volume, "{used}: {listed:#}");
            wait("the event", || {
                events.stdout().contains("used up its data cap of 16 MB")
            })?;
            ensure!(net.a.path("eth")?["volume_used"].is_null());
            // What keeps the path alive goes on.
            let carried_now = carried(&net.a, &talk)?;
            ensure!(carried_now[1] < STREAM / 100, "{carried_now:?}");
            wait_used(&net.b, "wlan", Some("its data cap is used up at the peer"))?;

            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            talk.advance(SETTLED)?;
            let listed = net.a.path("wlan")?;
            let still = number(&listed, "volume_used")?;
            ensure!(
                still >= volume && listed["state"] == "down",
                "{used}: {listed:#}"
            );
            net.a.ctl(&["path", "limit", "wlan", "--volume", "1 GB"])?;
            net.wait_established()?;
            ensure!(carried(&net.a, &talk)?[1] > 0);

            // What a daemon counted before it was told to end, the next one knows.
            let used = number(&net.a.path("wlan")?, "volume_used")?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            let kept = number(&net.a.path("wlan")?, "volume_used")?;
            ensure!(kept >= used, "{used} became {kept}");
            net.wait_established()?;
            talk.finish()
        })
    });
}

#[test]
fn each_scheduler_carries_a_stream_at_once() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net)?;
            for name in [
                "lowest-rtt",
                "round-robin",
                "redundant",
                "blest",
                "balanced",
            ] {
                for node in [&net.a, &net.b] {
                    node.ctl(&["path", "scheduler", name])?;
                    ensure!(node.ctl(&["path", "scheduler"])?["scheduler"] == name);
                    ensure!(node.path("eth")?["scheduler"] == name);
                }
                talk.advance(SETTLED)?;
            }
            talk.finish()
        })
    });
}

#[test]
fn what_was_set_outlives_a_crash_until_it_is_reset() {
    isolated(|| {
        Setup::new().key("scheduler = \"blest\"").run(|net| {
            let of_file = net.a.ctl(&["path", "scheduler"])?;
            ensure!(
                of_file["scheduler"] == "blest" && of_file["changed"] == false,
                "{of_file:#}"
            );
            for change in [
                &["path", "prefer", "wlan", "--weight", "7", "--delta", "3.5"][..],
                &["path", "scheduler", "lowest-rtt"],
                &["path", "role", "eth", "secondary"],
                &[
                    "path", "limit", "wlan", "--rate", "20 Mbit", "--volume", "1 GB",
                ],
            ] {
                net.a.ctl(change)?;
            }
            let set = net.a.ctl(&["path", "scheduler"])?;
            ensure!(
                set["prefer"]["delta"] == 3.5 && set["changed"] == true,
                "{set:#}"
            );
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            let kept = net.a.ctl(&["path", "scheduler"])?;
            ensure!(kept == set, "{set:#} became {kept:#}");
            let (eth, wlan) = (net.a.path("eth")?, net.a.path("wlan")?);
            ensure!(
                eth["role"] == "secondary" && eth["preferred"] == false,
                "{eth:#}"
            );
            ensure!(
                wlan["rate_limit"] == 20_000_000 && wlan["preferred"] == true,
                "{wlan:#}"
            );
            net.a.ctl(&["path", "reset"])?;
            let again = net.a.ctl(&["path", "scheduler"])?;
            ensure!(again == of_file, "{of_file:#} became {again:#}");
            Ok(())
        })
    });
}

#[test]
fn members_see_how_paths_are_used_and_change_nothing() {
    isolated_with_users(|| {
        Setup::new().run(|net| {
            let member = net.a.member(1000)?;
            let seen = member.ctl(&["path", "scheduler"])?;
            ensure!(seen["scheduler"] == "balanced", "{seen:#}");
            for change in [
                &["path", "prefer", "wlan"][..],
                &["path", "unprefer"],
                &["path", "scheduler", "blest"],
                &["path", "role", "wlan", "never"],
                &["path", "limit", "wlan", "--volume", "1 MB"],
                &["path", "reset"],
                &["speed"],
            ] {
                let said = member.refused(change)?;
                ensure!(said.contains("only root"), "{change:?}: {said}");
            }
            ensure!(net.a.ctl(&["path", "scheduler"])? == seen);
            Ok(())
        })
    });
}
