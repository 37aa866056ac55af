//! What lies over the rest for a while: the change of settings, and the help.

use console::screen::{DIMMED, FAULT, window};
use ratatui::{
    Frame,
    layout::Rect,
    style::Modifier,
    text::{Line, Text},
    widgets::{Paragraph, Wrap},
};

use crate::top::state::Edit;

pub(super) const HELP: &str = "\
↑ ↓ k j PgUp PgDn Home End   choose a disk (or a group: ◆)
s                            sort by the next column
r                            the other way round
/                            only names that contain …; Esc: all again
t Enter                      change limits, prefetch … of the chosen one
?                            this page
Ctrl-Z                       stop; `fg` continues
q Ctrl-C                     quit

The first line names the interval that figures are of. P50 and P99 are how
long half of the reads and writes took at most, and 99 of 100; HELD is the
share of the interval in which requests waited for limits; WAIT how many
wait now, and HELD BY the limit that they wait for, of a group after its
name. How long requests waited is below the charts, in which lines that
never move are limits. Of what is read ahead, accuracy is the share used.
";

pub(super) fn draw_edit(frame: &mut Frame<'_>, area: Rect, edit: &Edit) {
    let inside = window(frame, area, area.width - 4, 10, format!(" settings of {} ", edit.name));
    let line = Rect { height: 1, ..inside };
    let (text, column) = edit.field.window(usize::from(line.width));
    frame.render_widget(Line::styled(text, Modifier::BOLD), line);
    frame.set_cursor_position((line.x + column as u16, line.y));
    let below = Rect { y: inside.y + 2, height: inside.height - 2, ..inside };
    let text = match (&edit.error, edit.is_waiting) {
        (_, true) => Text::styled("asking the daemon …", DIMMED),
        (Some(said), _) => Text::styled(said.clone(), FAULT),
        (None, false) => Text::styled(
            "name=value, separated by spaces; what is left out is unset.\n\
             bps-total bps-read bps-write iops-total iops-read iops-write, each also with -max (burst) and \
             -max-length (its seconds); iops-size; weight iops-reservation bps-reservation watermark group; of \
             disks prefetch and prefetch-memory, -largest-request, -window-min, -window-max, -streams.\n\
             Enter: change it at once · Esc: leave it",
            DIMMED,
        ),
    };
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), below);
}
