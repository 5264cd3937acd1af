//! What the journal gets under systemd.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::{Node, Setup, isolated};
use nix::sys::signal::Signal;

/// Where the journal takes entries, on a host.
fn journal(node: &Node) -> Result<UnixDatagram> {
    let directory = node.host.run_dir().join("systemd/journal");
    std::fs::create_dir_all(&directory).context("directory of the journal")?;
    let socket = UnixDatagram::bind(directory.join("socket")).context("socket of the journal")?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket)
}

/// Whether an entry has a field with this value: its name, the value's length in eight bytes, and the value.
fn has(entry: &[u8], name: &str, value: &str) -> bool {
    let length = (value.len() as u64).to_le_bytes();
    let field = [name.as_bytes(), b"\n", &length, value.as_bytes(), b"\n"].concat();
    entry.windows(field.len()).any(|window| window == field)
}

#[test]
fn events_have_fields_there_and_standard_error_has_nothing() {
    isolated(|| {
        Setup::new().run(|net| {
            let socket = journal(&net.a)?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.set_journaled();
            let before = net.a.log().len();
            net.a.start()?;
            let mut entries: Vec<Vec<u8>> = Vec::new();
            wait("the session's entry in the journal", || {
                let mut entry = vec![0; 1 << 16];
                while let Ok(length) = socket.recv(&mut entry) {
                    entries.push(entry[..length].to_vec());
                }
                let up = |entry: &Vec<u8>| {
                    has(entry, "DIBS_EVENT", "session_up") && has(entry, "DIBS_PEER", "server")
                };
                entries.iter().any(up)
            })?;
            let ready = |entry: &Vec<u8>| has(entry, "MESSAGE", "ready");
            ensure!(entries.iter().any(ready), "{} entries", entries.len());
            let log = net.a.log();
            ensure!(log.len() == before, "on standard error: {log}");
            Ok(())
        })
    });
}
