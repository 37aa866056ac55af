//! Windows over the rest of the screen: the editor of settings, and the help.

use console::screen::{DIMMED, FAULT, window};
use ratatui::{
    Frame,
    layout::Rect,
    style::Modifier,
    text::{Line, Text},
    widgets::{Paragraph, Wrap},
};

use crate::top::state::SettingsEditor;

pub(super) const HELP: &str = "\
↑ ↓ k j PgUp PgDn Home End   select a disk (or a group: ◆)
s                            sort by the next column
r                            reverse the order
/                            filter by name; Esc clears the filter
t Enter                      change settings of the selected row
?                            this page
Ctrl-Z                       stop; `fg` continues
q Ctrl-C                     quit

The first line has the interval of all figures except WAIT. P50 and P99 are
percentiles of the latencies of reads and writes. HELD is the share of the
interval in which requests waited for limits, WAIT the number of requests
that wait now, and HELD BY the limit that they wait for, after the name of
its group. Jobs that run or have failed are below the list. Below the charts
are the waits. Straight lines in the charts are limits. Accuracy is the share
of prefetched data that was used.
";

pub(super) fn draw_edit(frame: &mut Frame<'_>, area: Rect, edit: &SettingsEditor) {
    let inside = window(frame, area, area.width - 4, 10, format!(" settings of {} ", edit.name));
    let line = Rect { height: 1, ..inside };
    let (text, column) = edit.field.window(usize::from(line.width));
    frame.render_widget(Line::styled(text, Modifier::BOLD), line);
    frame.set_cursor_position((line.x + column as u16, line.y));
    let below = Rect { y: inside.y + 2, height: inside.height - 2, ..inside };
    let text = match (&edit.error, edit.is_waiting) {
        (_, true) => Text::styled("asking the daemon …", DIMMED),
        (Some(error), _) => Text::styled(error.clone(), FAULT),
        (None, false) => Text::styled(
            "name=value, separated by spaces; settings that are left out are unset.\n\
             bps-total bps-read bps-write iops-total iops-read iops-write, each also with -max \
             (burst) and -max-length (its seconds); iops-size; weight iops-reservation \
             bps-reservation watermark group; of disks prefetch and prefetch-memory, \
             -largest-request, -window-min, -window-max, -streams.\n\
             Enter: apply · Esc: cancel",
            DIMMED,
        ),
    };
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), below);
}
