//! Lines of a terminal as a picture.

use maud::html;

const WIDTH: usize = 900;
const LINE: usize = 17;
const MARGIN: usize = 14;

/// The sections one below the other, each with a title.
pub(crate) fn svg(sections: &[(&str, String)]) -> String {
    let mut y = MARGIN;
    let mut lines = Vec::new();
    for (title, text) in sections {
        for (at, line) in std::iter::once(*title).chain(text.lines()).enumerate() {
            y += LINE;
            lines.push((y, at == 0, line));
        }
        y += LINE / 2;
    }
    let height = y + MARGIN;
    let picture = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (height) } width=(WIDTH) height=(height)
            font-size="13" {
            rect width="100%" height="100%" fill="white" style="fill:var(--paper,white)" {}
            @for (y, is_title, line) in lines {
                @if is_title {
                    text x=(MARGIN) y=(y) xml:space="preserve" font-family="sans-serif" font-weight="600" fill="black"
                        style="fill:var(--ink,black)" { (line) }
                } @else {
                    text x=(MARGIN) y=(y) xml:space="preserve" font-family="monospace" fill="#333"
                        style="fill:var(--ink,#333)" { (line) }
                }
            }
        }
    };
    picture.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_stands_below_the_one_before_it() {
        let svg = svg(&[("One", "a<b\nc".to_owned()), ("Two", "d".to_owned())]);
        assert_eq!(svg.matches("<text").count(), 5);
        assert!(svg.contains(">a&lt;b</text>"), "{svg}");
        let y: Vec<usize> = { svg.split("y=\"").skip(1) }
            .filter_map(|rest| rest.split('"').next()?.parse().ok())
            .collect();
        assert!(y.is_sorted_by(|a, b| a < b), "{y:?}");
    }
}
