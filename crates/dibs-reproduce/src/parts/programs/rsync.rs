//! rsync over ssh.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::Transport;
use dibs_netns::{HANG, wait_until};

use super::{Operation, Place, found};

const BYTES: usize = 4_000_000;

pub(super) fn run(place: &Place<'_>) -> Result<Vec<Operation>> {
    let directory = place.directory;
    let root = directory.display();
    let shell = |line: String| place.client.shell(&line);
    shell(format!(
        "ssh-keygen -q -t ed25519 -N '' -f {root}/host && ssh-keygen -q -t ed25519 -N '' -f {root}/user"
    ))?;
    shell(format!(
        "cp {root}/user.pub {root}/authorized && chmod 600 {root}/authorized"
    ))?;
    let sshd = found("sshd").context("sshd")?;
    let mut command = place.server.command(&sshd);
    // Where its user without rights has to be; each host of the lab has a /run of its own.
    place
        .server
        .shell("mkdir -p /run/sshd && chmod 755 /run/sshd")?;
    command
        .args(["-D", "-e", "-f", "/dev/null", "-h"])
        .arg(directory.join("host"));
    for option in [
        format!("ListenAddress={}", place.to),
        format!("AuthorizedKeysFile={root}/authorized"),
        format!("PidFile={root}/pid"),
        // The directory is open to all, as PostgreSQL's has to be.
        "StrictModes=no".to_owned(),
        "UsePAM=no".to_owned(),
        "PermitRootLogin=yes".to_owned(),
    ] {
        command.args(["-o", &option]);
    }
    let _server = place.server.spawn(command)?;
    wait_until(HANG, "sshd to listen", || {
        Transport::Tcp.connect(place.client, place.to).is_ok()
    })?;
    let file: Vec<u8> = (0..BYTES as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect();
    std::fs::write(directory.join("file"), &file)?;
    let (ip, port) = (place.to.ip(), place.to.port());
    // One connection for all files, as who sends many has it.
    let ssh = format!(
        "ssh -p {port} -i {root}/user -F /dev/null -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
         -o LogLevel=ERROR -o ControlMaster=auto -o ControlPath={root}/mux -o ControlPersist=60"
    );
    let line =
        format!("rsync --whole-file --ignore-times --rsh='{ssh}' {root}/file {ip}:{root}/copy");
    let start = Instant::now();
    let mut all = Vec::new();
    while start.elapsed() < place.span {
        let begun = Instant::now();
        let copied = place.client.shell(&line);
        let (at, took) = (start.elapsed(), begun.elapsed());
        if let (Err(error), true) = (&copied, all.is_empty()) {
            // Nothing to do with connections that move.
            return Err(anyhow::anyhow!("{error:#}")).context("the first file");
        }
        let right = copied.is_ok() && std::fs::read(directory.join("copy"))? == file;
        all.push(Operation {
            at,
            took,
            failed: !right,
        });
    }
    shell(format!("{ssh} -O exit {ip}"))?;
    ensure!(!all.is_empty(), "no file was sent");
    Ok(all)
}
