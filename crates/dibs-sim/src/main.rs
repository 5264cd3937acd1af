//! Runs histories of the simulator, or bulk transfers: `dibs-sim [--bulk] [--seeds N] [--seed S] [--jobs J]`.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dibs_sim::bulk::Table;
use dibs_sim::coverage::Histogram;

const USAGE: &str = "usage: dibs-sim [--bulk] [--seeds N] [--seed S] [--jobs J]
  --bulk     transfers of tens of megabytes over two links, beside the best link alone
  --seeds N  run N seeds, from the one of --seed on (default 2000 from 0, or 100 with --bulk; 1 if --seed stands
             alone, of which --bulk shows the course)
  --seed S   the first seed
  --jobs J   threads (default: one a processor)";

struct Arguments {
    bulk: bool,
    first: u64,
    count: u64,
    jobs: usize,
}

fn arguments() -> Result<Arguments, String> {
    let (mut first, mut count, mut bulk) = (None, None, false);
    let mut jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or(format!("{word} needs a number"))?;
            text.parse::<u64>()
                .map_err(|e| format!("{word} {text}: {e}"))
        };
        match word.as_str() {
            "--bulk" => bulk = true,
            "--seed" => first = Some(number()?),
            "--seeds" => count = Some(number()?),
            "--jobs" => jobs = number()?.max(1) as usize,
            _ => return Err(format!("{word} is not an option")),
        }
    }
    let all = if bulk { 100 } else { 2000 };
    Ok(Arguments {
        bulk,
        first: first.unwrap_or(0),
        count: count.unwrap_or(if first.is_some() { 1 } else { all }),
        jobs,
    })
}

fn main() -> ExitCode {
    if std::env::args().any(|word| word == "--help" || word == "-h") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(fault) => {
            eprintln!("{fault}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let began = Instant::now();
    let failed = match arguments.bulk {
        true => transfers(&arguments),
        false => histories(&arguments, began),
    };
    say(&format!(
        "{} seeds in {:.1} s, {failed} failed",
        arguments.count,
        began.elapsed().as_secs_f64()
    ));
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs histories; returns how many failed.
fn histories(arguments: &Arguments, began: Instant) -> u64 {
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let histogram = Mutex::new(Histogram::default());
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| {
                let mine = work(arguments, &next, &failed, began);
                let mut all = histogram.lock().expect("no thread panics with it");
                all.merge(&mine);
            });
        }
    });
    if arguments.count > 1 {
        let histogram = histogram.into_inner().expect("no thread panics with it");
        say(&format!("{histogram}"));
        let missing = histogram.missing();
        if !missing.is_empty() {
            say(&format!("never: {}", missing.join(", ")));
        }
    }
    failed.into_inner()
}

/// Runs bulk transfers, and shows them as a table; returns how many failed.
fn transfers(arguments: &Arguments) -> u64 {
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let table = Mutex::new(Table::default());
    let one = arguments.count == 1;
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= arguments.count {
                return;
            }
            match dibs_sim::bulk::run(arguments.first + at, one) {
                Ok(row) => {
                    row.outcome.course.iter().for_each(|line| say(line));
                    table.lock().expect("no thread panics with it").add(row);
                }
                Err(text) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    say(&format!("{text}\n"));
                }
            }
        }
    };
    std::thread::scope(|scope| (0..arguments.jobs).for_each(|_| drop(scope.spawn(work))));
    let table = table.into_inner().expect("no thread panics with it");
    say(&format!("{table}"));
    failed.into_inner()
}

fn work(arguments: &Arguments, next: &AtomicU64, failed: &AtomicU64, began: Instant) -> Histogram {
    let mut histogram = Histogram::default();
    loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        if at >= arguments.count {
            return histogram;
        }
        match dibs_sim::run(arguments.first + at) {
            Ok(report) if arguments.count == 1 => say(&format!("{report:#?}")),
            Ok(report) => histogram.add(&report.coverage),
            Err(text) => {
                failed.fetch_add(1, Ordering::Relaxed);
                say(&format!("{text}\n"));
            }
        }
        if at > 0 && at.is_multiple_of(500) {
            eprintln!("{at} seeds in {:.1} s", began.elapsed().as_secs_f64());
        }
    }
}

/// Prints a line; whoever reads may have gone.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
