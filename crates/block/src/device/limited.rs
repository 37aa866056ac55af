//! Groups and disks as the sampler knows them.

use policy::{
    throttle::{Counters, Enforcement, Limits},
    watermark::Watermark,
};

use super::sampler::Target;
use crate::{disk::Disk, layer::throttle::Group};

impl Target for Group {
    fn name(&self) -> &str {
        self.name()
    }

    fn watermark(&self) -> Watermark {
        self.watermark()
    }

    fn limits(&self) -> Limits {
        self.settings().limits
    }

    fn passed(&self) -> [Counters; 2] {
        let stats = self.stats();
        [stats.reads, stats.writes]
    }

    fn enforce(&self, enforcement: Enforcement) {
        self.enforce(enforcement);
    }
}

/// In a group, a disk has no watermark of its own: the group's is what lifts.
impl Target for Disk {
    fn name(&self) -> &str {
        self.name()
    }

    fn watermark(&self) -> Watermark {
        let member = self.throttle();
        if member.group().is_some() { Watermark::ALWAYS } else { member.watermark() }
    }

    fn limits(&self) -> Limits {
        self.throttle().settings().limits
    }

    fn passed(&self) -> [Counters; 2] {
        let stats = self.throttle().stats();
        [stats.reads, stats.writes]
    }

    fn enforce(&self, enforcement: Enforcement) {
        self.throttle().enforce(enforcement);
    }
}
