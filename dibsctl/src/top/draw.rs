//! The screen: in 80 columns and 24 lines all that matters, in more of them more.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::model::{Order, View};
use crate::table::Table as Shown;

/// Columns from which on there is room for everything.
const WIDE: u16 = 120;
/// What is shown at most where there are many.
const MOST_PATHS: usize = 6;
const MOST_BUMPS: usize = 4;
const MOST_DEVICES: usize = 6;
const MOST_NOTES: usize = 4;

/// What the screen shows beside what flows.
#[derive(Default)]
pub(super) struct Screen {
    /// Why there is nothing new.
    pub(super) trouble: Option<String>,
    pub(super) paused: bool,
    /// Connections above the first that is shown.
    offset: usize,
}

impl Screen {
    pub(super) fn scroll(&mut self, by: isize) {
        self.offset = self.offset.saturating_add_signed(by);
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, view: &View, order: Order) {
        let lines = |rows: usize, most: usize| 2 + rows.min(most) as u16;
        let notes = notes(view);
        let devices = match view.devices.len() {
            0 => 0,
            rows => lines(rows, MOST_DEVICES),
        };
        let [head, paths, bumps, devices, conns, foot] = Layout::vertical([
            Constraint::Length(1 + notes.len() as u16),
            Constraint::Length(lines(view.paths.len(), MOST_PATHS)),
            Constraint::Length(lines(view.bumps.len(), MOST_BUMPS)),
            Constraint::Length(devices),
            Constraint::Min(2),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let wide = frame.area().width >= WIDE;
        let daemon = Line::from(view.daemon.clone().bold());
        let lines = std::iter::once(daemon).chain(notes);
        frame.render_widget(Paragraph::new(Vec::from_iter(lines)), head);
        // Why one is not used stands in a line of its own.
        let columns: Vec<_> = PATHS.into_iter().enumerate().collect();
        draw_table(frame, below(paths), &view.paths(), &columns);
        let columns: Vec<_> = BUMPS.into_iter().enumerate().collect();
        draw_table(frame, below(bumps), &view.bumps(), &columns);
        let columns: Vec<_> = DEVICES.into_iter().enumerate().collect();
        draw_table(frame, below(devices), &view.devices(), &columns);
        self.draw_conns(frame, below(conns), view, wide);
        self.draw_foot(frame, foot, order);
    }

    fn draw_conns(&mut self, frame: &mut Frame<'_>, area: Rect, view: &View, wide: bool) {
        let room = usize::from(area.height.saturating_sub(1)).max(1);
        self.offset = self.offset.min(view.connections.len().saturating_sub(room));
        let mut table = view.connections();
        table.rows.drain(..self.offset);
        table.rows.truncate(room);
        // What stands in columns that the narrow screen leaves out: the own end, and the paths.
        let is_shown = |(column, _): &(usize, u16)| wide || ![0, 2, 9].contains(column);
        let columns: Vec<_> = CONNS.into_iter().enumerate().filter(is_shown).collect();
        draw_table(frame, area, &table, &columns);
    }

    fn draw_foot(&self, frame: &mut Frame<'_>, area: Rect, order: Order) {
        let line = match &self.trouble {
            Some(trouble) => Line::from(trouble.clone()).style(Style::new().fg(Color::Red)),
            None => {
                let way = if order.reverse { ", reversed" } else { "" };
                let paused = if self.paused { "paused; " } else { "" };
                Line::from(vec![
                    Span::raw(format!("{paused}sorted by {}{way}", order.by)).bold(),
                    Span::raw("   bit/s   s sort  r reverse  arrows scroll  p pause  q quit").dim(),
                ])
            }
        };
        frame.render_widget(Paragraph::new(line), area);
    }
}

/// What keeps paths from being used, and what else the user should hear.
fn notes(view: &View) -> Vec<Line<'static>> {
    let whys = view.paths.iter().filter_map(|path| {
        let why = path.why.as_ref()?;
        Some(format!("{} to {}: {why}", path.name, path.peer))
    });
    let warnings = view
        .warnings
        .iter()
        .map(|warning| format!("warning: {warning}"));
    let all = warnings.chain(whys).take(MOST_NOTES);
    all.map(|note| Line::from(note.yellow())).collect()
}

/// Widths of columns; none takes what is left.
const PATHS: [u16; 7] = [12, 12, 10, 8, 7, 8, 8];
const BUMPS: [u16; 4] = [12, 12, 8, 8];
const DEVICES: [u16; 5] = [24, 12, 8, 8, 0];
const CONNS: [u16; 10] = [6, 14, 0, 0, 8, 8, 8, 7, 6, 16];

/// An empty line parts it from what stands above.
fn below(area: Rect) -> Rect {
    let [_, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    rest
}

/// As [`crate::table::Table`]: a header that starts with `>` has its column flush right. All rates are in bits a
/// second, which the last line says.
fn draw_table(frame: &mut Frame<'_>, area: Rect, shown: &Shown, columns: &[(usize, u16)]) {
    let row = |texts: &dyn Fn(usize) -> String| {
        let cells = columns.iter().map(|(column, _)| {
            let text = texts(*column);
            let text = Line::from(text.replace("bit/s", "").trim_end().to_owned());
            Cell::from(match shown.headers[*column].starts_with('>') {
                true => text.right_aligned(),
                false => text,
            })
        });
        Row::new(cells)
    };
    let header = row(&|column| shown.headers[column].trim_start_matches('>').to_owned());
    let rows = shown
        .rows
        .iter()
        .map(|cells| row(&|column| cells[column].clone()));
    let widths = columns.iter().map(|(_, width)| match width {
        0 => Constraint::Fill(1),
        width => Constraint::Length(*width),
    });
    let table = Table::new(rows, widths)
        .header(header.style(Style::new().add_modifier(Modifier::DIM)))
        .column_spacing(1);
    frame.render_widget(table, area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use dibs_control::PathState;

    use super::super::model::{BumpRow, ConnRow, PathRow, Sort};
    use super::*;

    fn view(connections: usize) -> View {
        let path = |name: &str, state, why: Option<&str>| PathRow {
            name: name.to_owned(),
            peer: "server".to_owned(),
            state,
            srtt_us: Some(20_400),
            loss: 0.012,
            sent_rate: 5_000_000.0,
            received_rate: 0.0,
            why: why.map(str::to_owned),
        };
        let conn = |number: usize| ConnRow {
            id: format!("{number}").parse().expect("an id"),
            process: "postgres (1234)".to_owned(),
            local: "10.0.1.1:50000".to_owned(),
            remote: format!("203.0.113.200:{}", 10_000 + number),
            bump: "scramble".to_owned(),
            sent_rate: 1_234_567.0,
            received_rate: 12.0,
            retransmissions: 7,
            age: 3700,
            paths: vec!["eth".to_owned(), "wlan".to_owned()],
        };
        View {
            daemon: "dibsd 0.1.0, up 5h3m, 50 connections to peers, 50 on a bump".to_owned(),
            warnings: Vec::new(),
            paths: vec![
                path("eth", PathState::Up, None),
                path(
                    "wlan",
                    PathState::Down,
                    Some("its interface wlan0 is missing"),
                ),
            ],
            bumps: vec![BumpRow {
                name: "scramble".to_owned(),
                connections: 50,
                sent_rate: 61_728_350.0,
                received_rate: 600.0,
            }],
            devices: Vec::new(),
            connections: (0..connections).map(conn).collect(),
        }
    }

    fn drawn(screen: &mut Screen, view: &View, (width, height): (u16, u16)) -> Vec<String> {
        let order = Order {
            by: Sort::Rate,
            reverse: false,
        };
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| screen.draw(frame, view, order))
            .unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content.chunks(width.into());
        let line = |cells: &[ratatui::buffer::Cell]| {
            let text: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
            text.trim_end().to_owned()
        };
        lines.map(line).collect()
    }

    #[test]
    fn all_that_matters_is_readable_in_80_columns_and_24_lines() {
        let lines = drawn(&mut Screen::default(), &view(50), (80, 24));
        assert_eq!(lines[1], "wlan to server: its interface wlan0 is missing");
        assert_eq!(
            lines[4..6],
            [
                "eth          server       up          20.4 ms   1.2 %     40 M",
                "wlan         server       down        20.4 ms   1.2 %     40 M",
            ]
        );
        assert_eq!(lines[8], "scramble               50  493.8 M    4.8 k");
        assert_eq!(
            lines[11],
            "postgres (1234 203.0.113.200:10000     scramble    9.9 M       96       7   1h1m"
        );
        // Twelve of the fifty have room.
        let shown = lines
            .iter()
            .filter(|line| line.starts_with("postgres"))
            .count();
        assert_eq!(shown, 12);
        assert!(lines[23].starts_with("sorted by rate"), "{lines:?}");
        assert!(lines[23].ends_with("q quit"), "{lines:?}");
    }

    #[test]
    fn scrolling_ends_at_the_last_connection() {
        let mut screen = Screen::default();
        screen.scroll(1000);
        let lines = drawn(&mut screen, &view(50), (80, 24));
        assert!(lines[22].contains(":10049"), "{lines:?}");
        screen.scroll(isize::MIN);
        let lines = drawn(&mut screen, &view(50), (80, 24));
        assert!(lines[11].contains(":10000"), "{lines:?}");
    }

    #[test]
    fn a_wide_screen_shows_both_ends_and_the_paths_and_a_small_one_does_not_panic() {
        let lines = drawn(&mut Screen::default(), &view(3), (140, 30));
        assert!(lines[11].contains("10.0.1.1:50000"), "{lines:?}");
        assert!(lines[11].ends_with("eth wlan"), "{lines:?}");
        for size in [(1, 1), (5, 3), (80, 6), (300, 100)] {
            drawn(&mut Screen::default(), &view(50), size);
        }
    }
}
