//! Processor time of the whole machine and of processes, and their memory, from /proc.

use std::time::Duration;

use anyhow::{Context as _, Result};

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

/// Processor time that a process has used so far.
///
/// # Errors
/// There is no such process.
pub fn time_of(process: u32) -> Result<Duration> {
    let path = format!("/proc/{process}/stat");
    let text = std::fs::read_to_string(&path).context(path)?;
    let ticks = ticks(&text).context("/proc/PID/stat has other fields than expected")?;
    // USER_HZ, which is 100 wherever Linux has these files.
    Ok(Duration::from_millis(10 * ticks))
}

/// proc_pid_stat(5): behind the name, which may hold anything, utime and stime are the 12th and the 13th field.
fn ticks(text: &str) -> Option<u64> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

/// Bytes of memory of a process: a page of several processes counts for its part.
///
/// # Errors
/// As of [`time_of`].
pub fn memory_of(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = std::fs::read_to_string(&path).context(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let size = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(size.context("/proc/PID/smaps_rollup has no Pss")? << 10)
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
    fn a_process_may_have_any_name() {
        let text = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 8 9 20 0\n";
        assert_eq!(ticks(text), Some(200));
        assert_eq!(ticks("7 (a) S"), None);
        assert!(memory_of(std::process::id()).unwrap() > 0);
    }
}
