//! `top`: what flows, live.

mod draw;
mod model;

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use dibs_control::Client;
use ratatui::DefaultTerminal;

use crate::output::{show, unix_now};
use crate::units::seconds;
use draw::Screen;
use model::{Order, Sample, Sort, View};

/// Options of `top`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Print one measurement of one interval, and end; --json does so too
    #[arg(long)]
    once: bool,
    /// Column to sort connections by, highest first
    #[arg(long, value_name = "COLUMN", default_value = "rate")]
    sort: Sort,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// Seconds between two measurements
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = |text: &str| seconds(text, 0.1..=3600.0))]
    interval: f64,
}

/// Shows it until the user has enough, or once.
pub(crate) fn run(options: &Options, socket: &Path, json: bool) -> Result<()> {
    let interval = Duration::from_secs_f64(options.interval);
    let order = Order {
        by: options.sort,
        reverse: options.reverse,
    };
    if options.once || json {
        let mut client = Client::connect(socket)?;
        let before = look(&mut client)?;
        std::thread::sleep(interval);
        let view = View::between(&before, &look(&mut client)?, order, unix_now());
        return show(json, &view, || view.to_string());
    }
    if !std::io::stdout().is_terminal() {
        bail!("top draws on a terminal: --once prints what flows, --json for programs");
    }
    // Who cannot reach the daemon gets a sentence, not a screen.
    let client = Client::connect(socket)?;
    let mut live = Live::new(socket, client, interval, order)?;
    let mut terminal = ratatui::try_init()?;
    let shown = live.run(&mut terminal);
    ratatui::restore();
    shown
}

fn look(client: &mut Client) -> Result<Sample> {
    Ok(Sample {
        at: Instant::now(),
        status: client.status()?,
        conns: client.conns()?,
    })
}

/// The live screen, and what it knows.
struct Live<'a> {
    socket: &'a Path,
    /// None while the daemon does not answer.
    client: Option<Client>,
    interval: Duration,
    order: Order,
    paused: bool,
    /// The last two looks.
    before: Sample,
    latest: Sample,
    screen: Screen,
}

impl<'a> Live<'a> {
    fn new(socket: &'a Path, mut client: Client, interval: Duration, order: Order) -> Result<Self> {
        let before = look(&mut client)?;
        Ok(Self {
            socket,
            client: Some(client),
            interval,
            order,
            paused: false,
            latest: before.clone(),
            before,
            screen: Screen::default(),
        })
    }

    fn run(&mut self, terminal: &mut DefaultTerminal) -> Result<()> {
        loop {
            let view = View::between(&self.before, &self.latest, self.order, unix_now());
            terminal.draw(|frame| self.screen.draw(frame, &view, self.order))?;
            let due = self.latest.at + self.interval;
            let patience = due.saturating_duration_since(Instant::now());
            if event::poll(patience)? {
                if let Event::Key(key) = event::read()?
                    && key.kind == KeyEventKind::Press
                    && self.is_end(key)
                {
                    return Ok(());
                }
            } else if !self.paused {
                self.look();
            } else {
                self.latest.at = Instant::now();
            }
        }
    }

    /// Takes another look. While the daemon does not answer, what was seen last stays.
    fn look(&mut self) {
        let client = match self.client.take() {
            Some(client) => Ok(client),
            None => Client::connect(self.socket).map_err(anyhow::Error::from),
        };
        let looked = client.and_then(|mut client| Ok((look(&mut client)?, client)));
        match looked {
            Ok((sample, client)) => {
                self.client = Some(client);
                self.screen.trouble = None;
                self.before = std::mem::replace(&mut self.latest, sample);
            }
            Err(error) => {
                self.screen.trouble = Some(format!("{error:#}"));
                self.latest.at = Instant::now();
            }
        }
    }

    /// Does what a key asks for; true if that is to end.
    fn is_end(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('s') => self.order.by = self.order.by.next(),
            KeyCode::Char('r') => self.order.reverse = !self.order.reverse,
            KeyCode::Char('p') | KeyCode::Char(' ') => {
                self.paused = !self.paused;
                self.screen.paused = self.paused;
            }
            KeyCode::Up | KeyCode::Char('k') => self.screen.scroll(-1),
            KeyCode::Down | KeyCode::Char('j') => self.screen.scroll(1),
            KeyCode::PageUp => self.screen.scroll(-10),
            KeyCode::PageDown => self.screen.scroll(10),
            KeyCode::Home => self.screen.scroll(isize::MIN),
            _ => {}
        }
        false
    }
}
