//! Returns memory to the system after clients have disconnected.

use std::cell::Cell;

use policy::time::Duration;
use reactor::buffer;

/// Delay after the first disconnect that a trim covers.
const TRIM_DELAY: Duration = Duration::from_secs(1);

/// Trims the buffer pool of this thread and the allocator's heap after [`TRIM_DELAY`], once for all
/// clients that disconnect within it. The allocator keeps freed memory between live allocations:
/// without the trim, 10,000 clients that connected and disconnected would leave 300 MiB.
pub(crate) fn trim_memory_soon() {
    thread_local! { static SOON: Cell<bool> = const { Cell::new(false) } }
    // The trim that an earlier disconnect scheduled covers this one as well.
    if SOON.replace(true) {
        return;
    }
    reactor::spawn(async {
        reactor::sleep_until(reactor::now() + TRIM_DELAY).await;
        SOON.set(false);
        buffer::trim();
    });
}
