//! Processor time of the whole machine, from /proc.

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
}
