//! Rules that have a scheduler: the copies that `redundant` makes show which connections it is for.

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;

/// A connection that was put on seal.
fn sealed(net: &Net, port: u16) -> Result<Talk> {
    let talk = net.talk(port)?;
    talk.advance(256 << 10)?;
    net.a.put_on("seal", "--dport", port)?;
    net.wait_bump(port, "seal")?;
    talk.advance(SETTLED)?;
    Ok(talk)
}

/// Copies that a host sent while a stream went on for a while.
fn copied(node: &Node, talk: &Talk) -> Result<u64> {
    let before = node.counter("chunk_copied")?;
    talk.advance(1 << 20)?;
    Ok(node.counter("chunk_copied")? - before)
}

#[test]
fn a_rule_of_the_file_shares_out_its_connections_and_no_others_by_its_scheduler() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000\nscheduler = \"redundant\"";
        Setup::new().rule(rule).run(|net| {
            let other = sealed(net, 7001)?;
            ensure!(copied(&net.a, &other)? == 0);
            let ours = net.talk(7000)?;
            net.wait_bump(7000, "seal")?;
            ensure!(copied(&net.a, &ours)? > 0);
            // The other host has no such rule.
            ensure!(copied(&net.b, &ours)? == 0);
            let listed = net.a.ctl(&["rule", "list"])?;
            ensure!(listed[0]["scheduler"] == "redundant", "{listed:#}");
            ours.finish()?;
            other.finish()
        })
    });
}

#[test]
fn a_rule_made_meanwhile_has_its_scheduler_at_once_and_after_a_crash() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = sealed(net, 7000)?;
            ensure!(copied(&net.a, &talk)? == 0);
            let add = ["rule", "add", "--dport", "7000", "--bump", "seal"];
            let add = |scheduler| [&add[..], &["--scheduler", scheduler]].concat();
            let made = net.a.ctl(&add("redundant"))?;
            ensure!(made["scheduler"] == "redundant", "{made:#}");
            ensure!(copied(&net.a, &talk)? > 0);

            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            let listed = net.a.ctl(&["rule", "list"])?;
            ensure!(listed[0] == made, "{made:#} became {listed:#}");
            net.wait_bump(7000, "seal")?;
            ensure!(copied(&net.a, &talk)? > 0);

            let said = net.a.refused(&add("blest"))?;
            ensure!(said.contains("has another scheduler"), "{said}");
            let said = net
                .a
                .refused(&[&add("blest")[..], &["--uid", "0"]].concat())?;
            ensure!(
                said.contains("a rule with uid cannot have a scheduler"),
                "{said}"
            );

            // The connection stays on the bump that was chosen for it.
            net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
            wait("data that is copied no more", || {
                copied(&net.a, &talk).is_ok_and(|copies| copies == 0)
            })?;
            ensure!(net.a.bumps(7000)? == ["seal"]);
            talk.finish()
        })
    });
}
