//! PostgreSQL, by pgbench.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, wait_until};

use super::{Place, Transaction};

/// Where Debian has it.
pub(super) const SERVER: &str = "/usr/lib/postgresql/*/bin/postgres";
const USER: &str = "postgres";
const CLIENTS: &str = "16";

pub(super) fn run(place: &Place<'_>) -> Result<Vec<Transaction>> {
    let postgres = found(SERVER).context("PostgreSQL's server")?;
    let data = place.directory.join("data");
    // It refuses to be root's.
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(place.directory, open)?;
    let initdb = postgres.with_file_name("initdb");
    let (initdb, shown) = (initdb.display(), data.display());
    place.server.shell(&format!(
        "cd / && runuser -u {USER} -- {initdb} --no-sync --auth=trust -D {shown} 2>&1"
    ))?;
    std::fs::write(data.join("pg_hba.conf"), "host all all 0.0.0.0/0 trust\n")?;
    let mut command = place.server.command("runuser");
    command
        .args(["-u", USER, "--"])
        .arg(&postgres)
        .arg("-D")
        .arg(&data);
    let (ip, port) = (place.to.ip().to_string(), place.to.port().to_string());
    for setting in [
        &format!("listen_addresses={ip}")[..],
        &format!("port={port}"),
        &format!("unix_socket_directories={shown}"),
        "fsync=off",
        "synchronous_commit=off",
        "shared_buffers=64MB",
    ] {
        command.args(["-c", setting]);
    }
    command.current_dir("/");
    let _server = place.server.spawn(command)?;
    let pgbench = format!("pgbench -h {ip} -p {port} -U {USER}");
    wait_until(HANG, "PostgreSQL to take connections", || {
        place
            .client
            .shell(&format!("{pgbench} -i -s 5 -q {USER} 2>&1"))
            .is_ok()
    })?;
    let seconds = place.span.as_secs();
    let mut command = place.client.command("pgbench");
    command.args(["-h", &ip, "-p", &port, "-U", USER]);
    command.args(["-c", CLIENTS, "-j", "2", "-T", &seconds.to_string()]);
    // One line a transaction, in one file a thread.
    command.args(["--log", "--log-prefix", "transactions", USER]);
    command.current_dir(place.directory);
    let output = place.client.spawn(command)?.output(place.span + HANG)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "pgbench: {}", said.trim());
    ensure!(!said.contains("aborted"), "pgbench: {}", said.trim());
    logged(place)
}

/// A program at this path, in which `*` is its latest version.
pub(super) fn found(program: &str) -> Option<PathBuf> {
    let Some((front, rest)) = program.split_once("/*/") else {
        return Some(Path::new(program).to_owned()).filter(|place| place.is_file());
    };
    let versions = { std::fs::read_dir(front).ok()? }
        .filter_map(|entry| Some(entry.ok()?.path().join(rest)))
        .filter(|place| place.is_file());
    versions.max()
}

/// What pgbench logged: client, number, microseconds that it took, script, and when it ended in seconds and microseconds.
fn logged(place: &Place<'_>) -> Result<Vec<Transaction>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(place.directory)? {
        let file = entry?.path();
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !name.starts_with("transactions") {
            continue;
        }
        for line in std::fs::read_to_string(&file)?.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| -> Option<u64> { words.get(at)?.parse().ok() };
            let ended = number(4)
                .zip(number(5))
                .context("a line of pgbench's log")?;
            let ended = Duration::from_secs(ended.0) + Duration::from_micros(ended.1);
            // Of a failed one there is a word in place of the time.
            let took = number(2).map(Duration::from_micros);
            all.push((ended, took));
        }
    }
    let begun = all
        .iter()
        .map(|(ended, took)| *ended - took.unwrap_or_default())
        .min();
    let begun = begun.context("pgbench logged nothing")?;
    let operation = |(ended, took): (Duration, Option<Duration>)| Transaction {
        at: ended - begun,
        took: took.unwrap_or_default(),
        failed: took.is_none(),
    };
    Ok(all.into_iter().map(operation).collect())
}
