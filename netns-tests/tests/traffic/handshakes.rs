//! Keys that are agreed by an untrusted path, as the trusted link is down.

use anyhow::{Context as _, Result, ensure};
use dibs_lab::End;
use netns_tests::daemon::{Node, wait};
use netns_tests::topology::server;
use netns_tests::traffic::{Talk, connect};
use netns_tests::{Net, Setup, isolated};

/// Value of `peer list --json` for the only peer.
fn said_of_peer(node: &Node, key: &str) -> Result<String> {
    let peers = node.ctl(&["peer", "list"])?;
    let said = &peers[0][key];
    Ok(said.as_str().unwrap_or_default().to_owned())
}

/// Both daemons start while the trusted link is down.
fn start_without_the_trusted_link(net: &mut Net) -> Result<()> {
    net.eth.down(End::B)?;
    net.a.start()?;
    net.b.start()
}

fn wait_keys(net: &Net, keys: &str) -> Result<()> {
    wait(keys, || {
        let says = |node| said_of_peer(node, "keys").is_ok_and(|said| said == keys);
        says(&net.a) && says(&net.b)
    })
}

#[test]
fn any_path_will_do_if_the_user_says_so() {
    isolated(|| {
        let setup = Setup::new().key("handshake = \"any\"").without_daemons();
        setup.run(|net| {
            // By the link that goes down then.
            let ends = connect(&net.a.host, &net.b.host, server(7000))?;
            start_without_the_trusted_link(net)?;
            wait_keys(net, "untrusted")?;
            net.a.wait_path("wlan", "up")?;
            let talk = Talk::over(&net.a.host, &net.b.host, ends)?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_bump(7000, "seal")?;
            talk.advance(1 << 20)?;
            // By the trusted link as soon as it is there.
            net.eth.up(End::B)?;
            wait_keys(net, "trusted")?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn chained_waits_for_the_trusted_link_and_says_why() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            start_without_the_trusted_link(net)?;
            let why = "nothing secures a handshake over an untrusted path";
            wait("the reason", || {
                said_of_peer(&net.a, "reason").is_ok_and(|said| said.contains(why))
            })?;
            wait("the reason in the log", || net.a.log().contains(why))?;
            ensure!(said_of_peer(&net.a, "keys")?.is_empty());
            net.eth.up(End::B)?;
            wait_keys(net, "trusted")?;

            // The daemons' messages go by the other link once this one is gone.
            let talk = net.talk(7000)?;
            net.eth.down(End::B)?;
            net.a.wait_path("eth", "down")?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_bump(7000, "seal")
                .context("messages by the other link")?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}
