//! Processor time of the whole machine, time and memory of a process, from /proc.

use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::unistd::{SysconfVar, sysconf};

/// What was used between two looks.
pub(crate) struct Processor {
    last: Times,
}

/// In ticks, over all processors.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    all: u64,
    idle: u64,
    processors: u64,
}

impl Processor {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { last: look()? })
    }

    /// Since the last look, in percent of one processor.
    pub(crate) fn used(&mut self) -> Result<f64> {
        let now = look()?;
        let used = percent(self.last, now);
        self.last = now;
        Ok(used)
    }
}

fn percent(before: Times, now: Times) -> f64 {
    let all = now.all.saturating_sub(before.all);
    let idle = now.idle.saturating_sub(before.idle);
    let busy = all.saturating_sub(idle) as f64;
    busy / all.max(1) as f64 * now.processors as f64 * 100.0
}

fn look() -> Result<Times> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    times(&text).context("/proc/stat has other lines than expected")
}

/// proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
fn times(text: &str) -> Option<Times> {
    let first = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks = first.split_whitespace().map(|word| word.parse().ok());
    let ticks: Vec<u64> = ticks.take(8).collect::<Option<_>>()?;
    let of_one = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    Some(Times {
        all: ticks.iter().sum(),
        idle: ticks.get(3)? + ticks.get(4)?,
        processors: text.lines().filter(of_one).count() as u64,
    })
}

/// What a process has used since it started, its threads together.
pub(crate) fn used_by(pid: u32) -> Result<Duration> {
    let file = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&file).context(file)?;
    let each = sysconf(SysconfVar::CLK_TCK)?.context("clock ticks")?;
    let used = ticks(&text).context("/proc/PID/stat has other words than expected")?;
    Ok(Duration::from_secs_f64(used as f64 / each as f64))
}

/// proc_pid_stat(5): utime and stime are the 14th and 15th word; the second, a name in parentheses, may hold any character.
fn ticks(text: &str) -> Option<u64> {
    let (_, behind) = text.rsplit_once(')')?;
    let mut words = behind.split_whitespace().skip(11);
    Some(words.next()?.parse::<u64>().ok()? + words.next()?.parse::<u64>().ok()?)
}

/// The resident bytes of a process (VmRSS).
pub(crate) fn resident(pid: u32) -> Result<u64> {
    let file = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&file).context(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.context("no VmRSS")? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_counted_in_processors() {
        let before = times("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1\ncpu1 1\nintr 5\n").unwrap();
        let now = times("cpu  150 0 120 820 10 0 0 0 50 0\ncpu0 1\ncpu1 1\nintr 5\n").unwrap();
        // 70 of 100 ticks of two processors.
        assert_eq!(percent(before, now), 140.0);
        assert_eq!(times("cpu  1 2\n"), None);
    }

    #[test]
    fn the_time_of_a_process_stands_behind_its_name() {
        let text = "12 (a ) b) S 1 12 12 0 -1 4194560 5 0 0 0 700 21 0 0 20 0";
        assert_eq!(ticks(text), Some(721));
    }
}
