//! Read-ahead on spare capacity, through the throttle layer: requests are admitted at the same
//! instants with and without it, and a disk without limits bypasses the tree.

use std::sync::Arc;

use block::layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup, ThrottleMember};
use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, RateLimit, RequestCost, SpareRefund},
    time::{Duration, Instant},
};
use reactor::{now, sim, sleep_until, spawn_joinable};

use crate::seeds;

const LENGTH: u64 = 64 << 10;
/// Limit in bytes per second. The bucket holds a tenth of a second's worth: 1 MiB.
const RATE: u64 = 10 << 20;

fn limits(rate: u64) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::BpsTotal) = RateLimit { rate, ..RateLimit::NONE };
    limits
}

fn group(rate: u64) -> Arc<ThrottleGroup> {
    let settings = GroupSettings { limits: limits(rate), ..GroupSettings::default() };
    ThrottleGroup::new("shared", settings, None).expect("valid")
}

fn member(group: Option<&Arc<ThrottleGroup>>) -> ThrottleMember {
    ThrottleMember::new(DiskSettings::default(), 0, group).expect("no reservations")
}

fn read_ahead(member: &ThrottleMember) -> bool {
    member.try_read_ahead(&RequestCost::one(LENGTH), SpareRefund::NONE)
}

/// Number of read-aheads that are admitted at once.
fn fill(member: &ThrottleMember) -> usize {
    (0..1000).take_while(|_| read_ahead(member)).count()
}

#[test]
fn read_ahead_does_not_change_admission_times() {
    seeds::for_each("--test simulation", 50, |seed| {
        let (without, none) = sim::run(seed, run(false));
        let (passed, read_ahead) = sim::run(seed, run(true));
        assert_eq!(passed, without);
        assert!(none == 0 && read_ahead > 16, "{read_ahead} is no more than the bucket holds");
    });
}

/// Instants at which a disk's requests, which arrive in bursts, were admitted, and the number of
/// read-aheads of its neighbour.
async fn run(with_read_ahead: bool) -> (Vec<Instant>, usize) {
    let group = group(RATE);
    let (disk, neighbour) = (member(Some(&group)), member(Some(&group)));
    let guest = spawn_joinable(async move {
        let mut passed = Vec::new();
        for request in 0..200 {
            disk.admit(Direction::ALL[request % 2], RequestCost::one(LENGTH)).await;
            passed.push(now());
            if request % 40 == 0 {
                sleep_until(now() + Duration::from_millis(300)).await;
            }
        }
        passed
    });
    let mut count = 0;
    for _ in 0..1000 {
        // An odd period, so that read-aheads fall between the requests.
        sleep_until(now() + Duration::from_nanos(2_345_678)).await;
        if with_read_ahead {
            count += usize::from(read_ahead(&neighbour));
        }
    }
    (guest.await, count)
}

#[test]
fn spare_capacity_is_that_of_the_current_tree() {
    sim::run(1, async {
        let [full, empty] = [group(RATE), group(RATE)];
        let disk = member(Some(&full));
        // The bucket holds 16, and one more may overfill it.
        assert_eq!(fill(&disk), 17);
        assert_eq!(fill(&member(Some(&full))), 0);
        disk.move_to(Some(&empty)).expect("no reservations");
        assert_eq!(fill(&disk), 17);
        disk.set(DiskSettings { limits: limits(RATE / 2), ..DiskSettings::default() }).expect("valid");
        assert!(!read_ahead(&disk), "the group's is still more than full");
        disk.move_to(None).expect("no reservations");
        assert_eq!(fill(&disk), 9, "its own limits begin with empty buckets");
        disk.set(DiskSettings::default()).expect("valid");
        assert_eq!(fill(&disk), 1000, "nothing is limited");
        disk.move_to(Some(&full)).expect("no reservations");
        assert!(!read_ahead(&disk));
        full.lift_limits();
        assert_eq!(fill(&disk), 1000);
    });
}
