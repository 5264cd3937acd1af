//! Connections whose program has closed them while data is still to be sent: nobody's sockets, which no rule by
//! owner matches any more. Their own marks keep them where they are.

use std::io::{ErrorKind, Read as _, Write as _};

use anyhow::{Context as _, Result, bail, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::next_plaintext;
use netns_tests::{Net, Setup, isolated_with_users};

/// A connection of uid 1000 that its rule requires to be on `scramble`, closed while `meanwhile` happens and the
/// far end has read nothing: all of it comes by the bump.
fn closed_early(meanwhile: impl Fn(&Net) -> Result<()>) -> Result<()> {
    Setup::new().run(|net| {
        let member = net.a.member(1000)?;
        let rule = [
            "rule",
            "add",
            "--uid",
            "1000",
            "--bump",
            "scramble",
            "--require",
        ];
        member.ctl(&rule)?;
        let ears = net.eavesdrop()?;
        let (mut near, mut far) = member.connect(&net.b.host, server(7000))?;
        net.wait_bump(7000, "scramble")?;
        let plaintext = next_plaintext();
        near.set_nonblocking(true)?;
        let (mut sent, mut piece) = (0, [0; 16 << 10]);
        // Until neither end has room for more; what the far end's kernel has by then is not what counts.
        wait("full buffers", || {
            plaintext.fill(sent, &mut piece);
            match near.write(&piece) {
                Ok(count) => {
                    sent += count as u64;
                    false
                }
                Err(error) => error.kind() == ErrorKind::WouldBlock && outstanding(net) > 0,
            }
        })?;
        drop(near);
        wait("the socket to be nobody's", || {
            let listed = net.a.host.run("ss -Htn dport = :7000");
            listed.is_ok_and(|listed| listed.starts_with("FIN-WAIT-1"))
        })?;
        ensure!(outstanding(net) > 0, "nothing was left to send");
        meanwhile(net)?;

        let (mut received, mut expected) = (0, [0; 16 << 10]);
        loop {
            let read = far.read(&mut piece).context("receive")?;
            if read == 0 {
                break;
            }
            plaintext.fill(received, &mut expected[..read]);
            if piece[..read] != expected[..read] {
                bail!("the {read} bytes from {received} on are not those sent");
            }
            received += read as u64;
        }
        ensure!(received == sent, "{received} of {sent} bytes came");
        drop(far);
        let heard = ears.finish()?;
        // Neither the rest nor the FIN.
        heard.no_segment(7000)?;
        let always = std::time::UNIX_EPOCH..std::time::SystemTime::now();
        ensure!(heard.plain(&[plaintext], &always) == [0, 0], "in plain");
        Ok(())
    })
}

/// Bytes that the socket at `a` has still to send, or to be acknowledged.
fn outstanding(net: &Net) -> u64 {
    let listed = net.a.host.run("ss -Htn dport = :7000").unwrap_or_default();
    let queue = listed.split_ascii_whitespace().nth(2);
    queue.and_then(|queue| queue.parse().ok()).unwrap_or(0)
}

#[test]
fn the_rest_and_the_fin_of_a_closed_connection_go_by_its_bump() {
    isolated_with_users(|| closed_early(|_| Ok(())));
}

#[test]
fn so_they_do_after_the_entry_with_their_mark_was_lost() {
    isolated_with_users(|| closed_early(|net| net.a.host.run("conntrack -F").map(drop)));
}
