// Received state: disks and groups by name, and their tree.
//
// An overview replaces everything, a delta changes members. Any member may be missing or null: it is
// unknown then, and shown as such. Never sends a request, and never draws.

import { KINDS } from "./figures.js";

export class Store {
    /// Names of disks and groups are separate: a key is `disk/NAME` or `group/NAME`.
    nodes = new Map();
    daemon = {};
    devices = new Map();
    jobs = new Map();
    access = "read";
    timeMs = null;
    /// Incremented when nodes are added, removed or moved, so that the tree is rebuilt.
    shape = 0;

    /// True once an overview has been received.
    get isKnown() {
        return this.timeMs !== null;
    }

    static key = (kind, name) => `${kind}/${name}`;

    overview(message) {
        this.nodes = new Map();
        this.devices = new Map();
        this.jobs = new Map();
        this.daemon = message.daemon ?? {};
        this.access = message.access ?? "read";
        this.timeMs = message["time-ms"] ?? Date.now();
        this.take("group", message.groups);
        this.take("disk", message.disks);
        this.takeDevices(message.devices);
        this.takeJobs(message.jobs);
        this.shape += 1;
    }

    delta(message) {
        this.timeMs = message["time-ms"] ?? this.timeMs;
        this.take("group", message.groups);
        this.take("disk", message.disks);
        this.takeDevices(message.devices);
        this.takeJobs(message.jobs);
        for (const id of message.removed?.jobs ?? []) this.jobs.delete(id);
        for (const kind of ["group", "disk"]) {
            for (const name of message.removed?.[`${kind}s`] ?? []) {
                this.shape += this.nodes.delete(Store.key(kind, name)) ? 1 : 0;
            }
        }
    }

    take(kind, objects) {
        for (const members of objects ?? []) {
            const key = Store.key(kind, members.name);
            const node = this.nodes.get(key);
            if (!node) {
                this.nodes.set(key, { ...members, kind, key });
                this.shape += 1;
                continue;
            }
            const above = this.above(node);
            Object.assign(node, members);
            if (this.above(node) !== above) this.shape += 1;
        }
    }

    takeDevices(devices) {
        for (const device of devices ?? []) {
            this.devices.set(device.name, Object.assign(this.devices.get(device.name) ?? {}, device));
        }
    }

    /// A job is always sent with all members.
    takeJobs(jobs) {
        for (const job of jobs ?? []) this.jobs.set(job.id, job);
    }

    get(key) {
        return this.nodes.get(key) ?? null;
    }

    /// Name of its group, or null.
    above(node) {
        return node.group ?? null;
    }

    /// Groups above, nearest first; a circle ends where it closes.
    groupsAbove(node) {
        const found = [];
        for (let next = this.above(node); next !== null;) {
            const group = this.get(Store.key("group", next));
            if (!group || found.includes(group)) break;
            found.push(group);
            next = this.above(group);
        }
        return found;
    }

    disks() {
        return [...this.nodes.values()].filter(({ kind }) => kind === "disk");
    }
}

const sum = (a, b) => a == null && b == null ? null : (a ?? 0) + (b ?? 0);

/// Operations per second, both directions.
export const operations = (node) => sum(node["read-iops"], node["write-iops"]);

/// Bytes per second, both directions.
export const transferred = (node) => sum(node["read-bps"], node["write-bps"]);

/// True if any of its requests waits, or waited in the last second.
export const isHeld = (node) => node["wait-ratio"] > 0 || node["waiting-requests"] > 0;

/// Limit that it waits for, and the group that has the limit, unless it is its own; or null.
export function held(node, isShort = false) {
    const by = node["throttle-cause"];
    if (!by) return null;
    const limit = (isShort ? KINDS[by.limit] : null) ?? by.limit ?? "a limit";
    return { whose: by.name && by.name !== node.name ? by.name : null, limit };
}

/// Disk or group that has the limit.
export const holder = (node, store) => {
    const by = node["throttle-cause"];
    return (by && store.get(Store.key(by.level === "disk" ? "disk" : "group", by.name))) ?? (held(node) ? node : null);
};

/// The cause as text: `iops-total`, of a group above `gold: iops-total`; or null.
export function binding(node) {
    const by = held(node);
    return by && (by.whose === null ? by.limit : `${by.whose}: ${by.limit}`);
}
