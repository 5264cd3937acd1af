//! Hosts that forward for the networks behind them: connections between those go in and out of bumps, and
//! nothing else comes by them.

use anyhow::{Result, ensure};
use netns_tests::topology::{behind, behind_v6};
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Net, Setup, isolated};

/// In plain the eavesdropper hears the connection; on the bump it does not, and both ways move.
fn in_and_out(net: &Net, talk: &Talk, port: u16) -> Result<()> {
    talk.advance(256 << 10)?;
    let rule = [
        "rule",
        "add",
        "--dport",
        &port.to_string(),
        "--bump",
        "seal",
    ];
    let made = net.a.ctl(&rule)?;
    net.wait_bump(port, "seal")?;
    talk.advance(SETTLED)?;
    let ears = net.eavesdrop()?;
    talk.advance(SETTLED)?;
    ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
    net.wait_locked(port)?;
    net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
    net.wait_bump(port, "plain")?;
    talk.advance(256 << 10)?;
    let ears = net.eavesdrop()?;
    talk.advance(256 << 10)?;
    let all = std::time::SystemTime::UNIX_EPOCH..std::time::SystemTime::now();
    let plain = ears.finish()?.plain(&talk.plaintexts, &all);
    ensure!(plain[1] > 0, "it is not back in plain: {plain:?}");
    Ok(())
}

#[test]
fn a_rule_moves_a_connection_that_passes_and_the_far_gateway_follows() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            for server in [behind(7000), behind_v6(7001)] {
                let talk = Talk::start(&net.behind[0], &net.behind[1], server)?;
                in_and_out(net, &talk, server.port())?;
                talk.finish()?;
            }
            Ok(())
        })
    });
}
