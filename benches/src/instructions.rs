//! Instructions that a routine takes, where the processor counts them: unlike its time they do not depend on what else
//! the machine does.

use std::hint::black_box;
use std::io;

use criterion::{BenchmarkGroup, measurement::WallTime};
use perf_event::events::Hardware;
use perf_event::{Builder, Counter};

/// Runs that are counted together.
const RUNS: u64 = 64;

/// Counts instructions of this thread, in user mode.
pub struct Instructions {
    counter: io::Result<Counter>,
}

impl Instructions {
    /// Says why if there is no counter: virtual machines rarely have one.
    pub fn new() -> Self {
        Self::of(Builder::new(Hardware::INSTRUCTIONS).build())
    }

    fn of(counter: io::Result<Counter>) -> Self {
        if let Err(error) = &counter {
            eprintln!("no instructions are counted here: {error}");
        }
        Self { counter }
    }

    /// A benchmark of a routine by time, and by instructions behind it.
    pub fn bench<T>(
        &mut self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        name: &str,
        mut routine: impl FnMut() -> T,
    ) {
        let mut is_chosen = false;
        group.bench_function(name, |bencher| {
            is_chosen = true;
            bencher.iter(&mut routine);
        });
        if !is_chosen {
            return;
        }
        match self.count(|| (0..RUNS).for_each(|_| drop(black_box(routine())))) {
            Some(Ok(count)) => println!("{name}: {} instructions an iteration", count / RUNS),
            Some(Err(error)) => eprintln!("{name}: its instructions are not counted: {error}"),
            None => {}
        }
    }

    /// None without a counter.
    fn count(&mut self, routine: impl FnOnce()) -> Option<io::Result<u64>> {
        let counter = self.counter.as_mut().ok()?;
        let counted = || {
            counter.reset()?;
            counter.enable()?;
            routine();
            counter.disable()?;
            counter.read()
        };
        Some(counted())
    }
}

impl Default for Instructions {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event::events::Software;

    #[test]
    fn what_a_routine_does_is_counted_and_nothing_before_or_behind_it() {
        // In place of instructions: every kernel counts the faults of memory that is touched first.
        let faults = Builder::new(Software::PAGE_FAULTS).build();
        if let Err(error) = &faults {
            eprintln!("skipped: {error}");
            return;
        }
        let mut counter = Instructions::of(faults);
        let mut touch = |pages: usize| {
            let count = counter.count(|| drop(black_box(vec![1_u8; pages * 4096])));
            count.expect("there is a counter").unwrap()
        };
        // More than what an allocator keeps for reuse.
        let (none, many) = (touch(0), touch(16_384));
        assert!(none < 16 && many > 16, "{none} and {many} faults");
    }

    #[test]
    fn without_a_counter_nothing_is_counted() {
        let missing = Err(io::ErrorKind::NotFound.into());
        assert!(Instructions::of(missing).count(|| ()).is_none());
    }
}
