#!/usr/bin/python3
"""Random histories of block jobs: weir and qemu-storage-daemon execute the same commands, and the
images that result are compared.

    tests/job_histories/exercise.py WEIR [--histories 20] [--seed N] [--directory DIR]

A history begins with one qcow2 image, with or without a backing file. It writes, zeroes, discards,
takes snapshots, streams, backs up in full and by a dirty bitmap, mirrors and resizes, in a random
order, and writes while jobs run. Both daemons receive the same QMP messages; only the directory of
the images differs. After each step the whole disk is read from both and compared with a model in
memory. At the end the images are closed, and QEMU's tools compare each image, the names in the
chain, and the persistent bitmaps with their content.

Operations come from the seed alone. A difference prints the seed, the last commands, and ends with
status 1.
"""

import argparse
import collections
import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbd

KIB = 1024
MIB = 1024 * KIB
BLOCK = 4 * KIB
BITMAP = "qemu:dirty-bitmap:"
# Longest wait for a job, in seconds, on a machine that is busy otherwise.
JOB_SECONDS = 120


class Difference(Exception):
    """The daemons differ from each other or from the model."""


def run(*argv):
    """Standard output of a command that must succeed."""
    ended = subprocess.run([str(arg) for arg in argv], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise Difference(f"{' '.join(map(str, argv))}: {ended.stdout}{ended.stderr}")
    return ended.stdout


class Daemon:
    """A storage daemon with a QMP client and an NBD server. `argv` is the start of its command."""

    def __init__(self, name, argv, directory):
        self.name, self.directory = name, directory
        directory.mkdir()
        self.qmp_path, self.nbd_path = directory / "qmp", directory / "nbd"
        self.log = (directory / "log").open("w")
        server = ["--nbd-server", f"addr.type=unix,addr.path={self.nbd_path}"]
        monitor = [f"socket,path={self.qmp_path},server=on,wait=off,id=c", "--monitor", "chardev=c"]
        self.process = subprocess.Popen([*argv, "--chardev", *monitor, *server], stderr=self.log, stdout=self.log)
        self.socket = self.connect()
        self.lines = self.socket.makefile("rw")
        self.events = collections.deque()
        self.client = None
        self.read_message()
        self.command("qmp_capabilities")

    def connect(self):
        deadline = time.monotonic() + 60
        while True:
            client = socket.socket(socket.AF_UNIX)
            try:
                client.connect(str(self.qmp_path))
                client.settimeout(JOB_SECONDS)
                return client
            except OSError:
                client.close()
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                # No notification exists for the socket of another program.
                time.sleep(0.02)

    def read_message(self):
        line = self.lines.readline()
        if not line:
            raise Difference(f"{self.name}: the daemon has closed its control socket")
        return json.loads(line)

    def reply(self, command, **arguments):
        """The reply to a command: an object with `return` or `error`."""
        text = json.dumps({"execute": command, "arguments": arguments})
        self.lines.write(text.replace("DIR/", f"{self.directory}/") + "\n")
        self.lines.flush()
        while True:
            message = self.read_message()
            if "event" not in message:
                return message
            self.events.append(message)

    def command(self, command, **arguments):
        answer = self.reply(command, **arguments)
        if "error" in answer:
            raise Difference(f"{self.name}: {command} {arguments}: {answer['error']}")
        return answer["return"]

    def wait_for(self, job, wanted):
        """Waits until the status of a job becomes `wanted`."""
        self.wait_for_event("JOB_STATUS_CHANGE", lambda data: (data["id"], data["status"]) == (job, wanted))

    def wait_for_event(self, name, matches):
        """Waits for an event whose data matches. Earlier ones are forgotten."""
        while True:
            event = self.events.popleft() if self.events else self.read_message()
            if event["event"] == name and matches(event.get("data", {})):
                return

    def open(self, name):
        """Connects to an export."""
        self.close()
        self.client = nbd.NBD()
        self.client.connect_uri(f"nbd+unix:///{name}?socket={self.nbd_path}")

    def close(self):
        if self.client:
            self.client.shutdown()
        self.client = None

    def stop(self):
        self.close()
        self.reply("quit")
        self.socket.close()
        status = self.process.wait(60)
        self.log.close()
        if status != 0:
            raise Difference(f"{self.name}: exit status {status}: {(self.directory / 'log').read_text()[-2000:]}")


class History:
    """One history of both daemons."""

    OPERATIONS = [
        ("write", 30), ("zero", 8), ("discard", 8), ("flush", 3), ("snapshot", 8), ("stream", 8),
        ("full_backup", 6), ("add_bitmap", 6), ("clear_bitmap", 3), ("remove_bitmap", 2),
        ("merge_bitmap", 3), ("switch_bitmap", 3), ("incremental_backup", 8), ("cancelled_job", 4),
        ("mirror", 4), ("resize", 3), ("internal_snapshot", 3), ("delete_internal_snapshot", 2), ("reopen", 3),
    ]  # fmt: skip

    def __init__(self, pair, seed):
        self.pair, self.random = pair, random.Random(seed)
        self.log = collections.deque(maxlen=60)
        self.counts = collections.Counter()
        self.number = 0
        # Node name and file of each image, the lowest first.
        self.chain = []
        # Name of a bitmap: file of the last backup that it belongs to.
        self.bitmaps = {}
        self.persistent = set()
        self.backups = {}
        # Names of internal snapshots of the topmost image.
        self.snapshots = []
        # True if the client creates and opens overlays, false if the daemon does.
        self.has_own_overlays = self.random.random() < 0.6
        self.discards = self.random.choice(("unmap", "ignore"))

    def name(self, prefix):
        self.number += 1
        return f"{prefix}{self.number}"

    def both(self, command, **arguments):
        self.log.append(f"{command} {json.dumps(arguments)}")
        for daemon in self.pair:
            daemon.command(command, **arguments)

    def create(self, file, size, *options):
        """The same new qcow2 image for both."""
        cluster = self.random.choice((4, 16, 64, 64)) * KIB
        self.log.append(f"create {file} {size} {options}")
        for daemon in self.pair:
            at = [str(option).replace("DIR/", f"{daemon.directory}/") for option in options]
            argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"cluster_size={cluster}"]
            run(*argv, *at, daemon.directory / file, size)

    def node(self, name, file):
        protocol = {"driver": "file", "filename": f"DIR/{file}", "discard": self.discards}
        return {"driver": "qcow2", "node-name": name, "discard": self.discards, "file": protocol}

    def export(self):
        top = self.chain[-1][0]
        self.both("block-export-add", type="nbd", id="e", **{"node-name": top, "writable": True, "name": "d"})
        for daemon in self.pair:
            daemon.open("d")

    def unexport(self):
        for daemon in self.pair:
            daemon.close()
            daemon.command("block-export-del", id="e", mode="hard")
            daemon.wait_for_event("BLOCK_EXPORT_DELETED", lambda data: data["id"] == "e")

    def run(self):
        size = self.random.randrange(4, 64) * 64 * KIB + self.random.choice((0, 0, BLOCK, 512))
        self.model = bytearray(size)
        name, file = self.name("n"), "base.qcow2"
        if self.random.random() < 0.5:
            self.create_base()
            self.create(file, size, "-F", "raw", "-b", "DIR/base.raw")
        else:
            self.create(file, size)
        self.both("blockdev-add", **self.node(name, file))
        self.chain.append((name, file))
        self.export()
        names, weights = zip(*self.OPERATIONS)
        for operation in self.random.choices(names, weights, k=self.random.randrange(8, 24)):
            if getattr(self, operation)() is not False:
                self.counts[operation] += 1
                self.compare_content()
        self.end()

    def create_base(self):
        # Also shorter or longer than the image above it.
        length = min(len(self.model), self.random.randrange(1, 64) * 64 * KIB)
        content = self.random.randbytes(64 * KIB) * (length // (64 * KIB))
        content = content[:len(self.model)]
        self.model[:len(content)] = content
        for daemon in self.pair:
            (daemon.directory / "base.raw").write_bytes(content)

    # Requests of the client.

    def range(self, most):
        """A random range of the disk, in sectors."""
        sectors = len(self.model) // 512
        length = self.random.randrange(1, most // 512 + 1)
        start = self.random.randrange(sectors)
        if self.random.random() < 0.5:
            start -= start % 8
        length = min(length, sectors - start)
        return start * 512, length * 512

    def write(self):
        for _ in range(self.random.randrange(1, 6)):
            at, length = self.range(160 * KIB)
            data = self.random.randbytes(512) * (length // 512)
            self.log.append(f"write {at} {length}")
            for daemon in self.pair:
                daemon.client.pwrite(data, at)
            self.model[at:at + length] = data

    def zero(self):
        at, length = self.range(300 * KIB)
        flags = self.random.choice((0, nbd.CMD_FLAG_NO_HOLE))
        self.log.append(f"zero {at} {length} {flags}")
        for daemon in self.pair:
            daemon.client.zero(length, at, flags)
        self.model[at:at + length] = bytes(length)

    def discard(self):
        """Discards, and writes: content after a discard alone is not defined."""
        at, length = self.range(300 * KIB)
        self.log.append(f"discard and write {at} {length}")
        data = self.random.randbytes(512) * (length // 512)
        for daemon in self.pair:
            daemon.client.trim(length, at)
            daemon.client.pwrite(data, at)
        self.model[at:at + length] = data

    def flush(self):
        for daemon in self.pair:
            daemon.client.flush()

    def change(self):
        for _ in range(self.random.randrange(0, 4)):
            self.random.choice((self.write, self.zero, self.discard))()

    # Jobs and snapshots.

    def finish_job(self, job):
        for daemon in self.pair:
            daemon.wait_for(job, "concluded")
            listed = [entry for entry in daemon.command("query-jobs") if entry["id"] == job]
            if not listed or listed[0].get("error"):
                raise Difference(f"{daemon.name}: {job}: {listed}")
            daemon.command("job-dismiss", id=job)

    def snapshot(self):
        if self.bitmaps or self.snapshots or len(self.chain) > 4:
            return False
        (top, below), name, file = self.chain[-1], self.name("n"), f"{self.name('overlay')}.qcow2"
        if self.has_own_overlays:
            self.create(file, len(self.model), "-F", "qcow2", "-b", f"DIR/{below}")
            self.both("blockdev-add", **self.node(name, file), backing=None)
            self.both("blockdev-snapshot", node=top, overlay=name)
        else:
            created = {"snapshot-node-name": name, "snapshot-file": f"DIR/{file}", "format": "qcow2"}
            self.both("blockdev-snapshot-sync", **{"node-name": top}, **created)
        self.chain.append((name, file))

    def stream(self):
        # weir refuses it with internal snapshots, whose content QEMU would lose.
        if len(self.chain) < 2 or self.snapshots:
            return False
        top, job = self.chain[-1][0], self.name("job")
        arguments = {"device": top, "job-id": job, "auto-dismiss": False}
        # An image that stays; at least one below the top is removed.
        kept = self.random.randrange(len(self.chain) - 1)
        if kept > 0:
            arguments["base"] = f"DIR/{self.chain[kept - 1][1]}"
        self.both("block-stream", **arguments)
        self.change()
        self.finish_job(job)
        self.delete_nodes([name for name, _ in self.chain[kept:-1]])
        self.chain = self.chain[:kept] + self.chain[-1:]

    def delete_nodes(self, names):
        """Deletes nodes that a job has left: QEMU keeps those that a client has named."""
        for daemon in self.pair:
            for name in reversed(names):
                daemon.reply("blockdev-del", **{"node-name": name})

    def add_target(self, content_of=None):
        """Adds a node for a target: a new image, or a copy of an image."""
        name, file = self.name("t"), f"{self.name('target')}.qcow2"
        if content_of:
            self.log.append(f"copy {content_of} {file}")
            for daemon in self.pair:
                shutil.copy(daemon.directory / content_of, daemon.directory / file)
        else:
            self.create(file, len(self.model))
        self.both("blockdev-add", **self.node(name, file))
        return name, file

    def backup(self, target, **more):
        """A backup of this instant, while the client goes on."""
        (name, file), job = target, self.name("job")
        arguments = {"device": self.chain[-1][0], "target": name, "job-id": job, "auto-dismiss": False}
        expected = bytes(self.model)
        self.both("blockdev-backup", **arguments, **more)
        self.change()
        self.finish_job(job)
        self.both("blockdev-del", **{"node-name": name})
        self.backups[file] = expected

    def full_backup(self):
        self.backup(self.add_target(), sync="full")

    def add_bitmap(self):
        if len(self.bitmaps) > 2:
            return False
        name, granularity = self.name("b"), self.random.choice((4, 16, 64)) * KIB
        node = {"node": self.chain[-1][0], "name": name}
        persistent = self.random.random() < 0.7
        self.both("block-dirty-bitmap-add", **node, granularity=granularity, persistent=persistent)
        target = self.add_target()
        # The bitmap marks what has changed before the backup, too, which a later one copies again.
        self.backup(target, sync="full")
        self.bitmaps[name] = target[1]
        if persistent:
            self.persistent.add(name)

    def clear_bitmap(self):
        if not self.bitmaps:
            return False
        name = self.random.choice(sorted(self.bitmaps))
        self.both("block-dirty-bitmap-clear", node=self.chain[-1][0], name=name)
        target = self.add_target()
        self.backup(target, sync="full")
        self.bitmaps[name] = target[1]

    def remove_bitmap(self):
        if not self.bitmaps:
            return False
        name = self.random.choice(sorted(self.bitmaps))
        self.both("block-dirty-bitmap-remove", node=self.chain[-1][0], name=name)
        del self.bitmaps[name]

    def merge_bitmap(self):
        """Adds the marks of one bitmap to another, which then belongs to both backups."""
        if len(self.bitmaps) < 2:
            return False
        source, target = self.random.sample(sorted(self.bitmaps), 2)
        self.both("block-dirty-bitmap-merge", node=self.chain[-1][0], target=target, bitmaps=[source])

    def switch_bitmap(self):
        """Disables a bitmap for a moment without changes, and enables it."""
        if not self.bitmaps:
            return False
        node = {"node": self.chain[-1][0], "name": self.random.choice(sorted(self.bitmaps))}
        self.both("block-dirty-bitmap-disable", **node)
        self.both("block-dirty-bitmap-enable", **node)

    def incremental_backup(self):
        if not self.bitmaps:
            return False
        name = self.random.choice(sorted(self.bitmaps))
        target = self.add_target(content_of=self.bitmaps[name])
        self.backup(target, sync="incremental", bitmap=name)
        self.bitmaps[name] = target[1]

    def cancelled_job(self):
        """A job that is so slow that it is cancelled before its end."""
        if not self.model.strip(b"\0"):
            return False
        (name, file), job, top = self.add_target(), self.name("job"), self.chain[-1][0]
        command = self.random.choice(("blockdev-backup", "blockdev-mirror"))
        if self.bitmaps or len(self.model) < MIB:
            command = "blockdev-backup"
        more = {"job-id": job, "auto-dismiss": False, "speed": 64 * KIB, "sync": "full"}
        if self.bitmaps and self.random.random() < 0.5:
            bitmap = self.random.choice(sorted(self.bitmaps))
            more |= {"sync": "bitmap", "bitmap": bitmap, "bitmap-mode": self.random.choice(("on-success", "never"))}
        self.both(command, device=top, target=name, **more)
        self.change()
        if self.random.random() < 0.5:
            for daemon in self.pair:
                daemon.reply("job-pause", id=job)
            self.change()
        for daemon in self.pair:
            # A job without data to copy has ended already.
            daemon.reply("job-cancel", id=job)
            daemon.wait_for(job, "concluded")
            daemon.command("job-dismiss", id=job)
        self.both("blockdev-del", **{"node-name": name})
        for daemon in self.pair:
            (daemon.directory / file).unlink()

    def internal_snapshot(self):
        name = self.name("s")
        self.both("blockdev-snapshot-internal-sync", device=self.chain[-1][0], name=name)
        self.snapshots.append(name)

    def delete_internal_snapshot(self):
        if not self.snapshots:
            return False
        name = self.snapshots.pop(self.random.randrange(len(self.snapshots)))
        self.both("blockdev-snapshot-delete-internal-sync", device=self.chain[-1][0], name=name)

    def reopen(self):
        """Closes all images, and opens the topmost one, which names the others."""
        self.flush()
        self.unexport()
        self.delete_nodes([name for name, _ in self.chain])
        name, (_, file) = self.name("n"), self.chain[-1]
        self.chain[-1] = (name, file)
        # Bitmaps that are not persistent do not exist any more.
        self.bitmaps = {name: backup for name, backup in self.bitmaps.items() if name in self.persistent}
        self.both("blockdev-add", **self.node(name, file))
        self.export()

    def mirror(self):
        if self.bitmaps or self.snapshots:
            return False
        (name, file), job, top = self.add_target(), self.name("job"), self.chain[-1][0]
        self.both("blockdev-mirror", device=top, target=name, sync="full", **{"job-id": job, "auto-dismiss": False})
        self.change()
        for daemon in self.pair:
            daemon.wait_for(job, "ready")
        self.change()
        stays = self.random.random() < 0.4
        if stays:
            # The target has the content of this instant.
            self.both("block-job-cancel", device=job)
            self.backups[file] = bytes(self.model)
        else:
            self.both("job-complete", id=job)
        self.finish_job(job)
        if stays:
            self.both("blockdev-del", **{"node-name": name})
            return
        self.delete_nodes([node for node, _ in self.chain])
        self.chain = [(name, file)]

    def resize(self):
        # Without its export QEMU closes a node that it has created itself.
        if self.bitmaps or self.snapshots or not self.has_own_overlays:
            return False
        size = len(self.model) + self.random.randrange(1, 8) * 64 * KIB
        # QEMU's export permits no other user to change the size.
        self.unexport()
        self.both("block_resize", **{"node-name": self.chain[-1][0], "size": size})
        self.model.extend(bytes(size - len(self.model)))
        self.export()

    # Comparisons.

    def compare_content(self):
        for daemon in self.pair:
            size = daemon.client.get_size()
            if size != len(self.model):
                raise Difference(f"{daemon.name}: the disk has {size} bytes, the model {len(self.model)}")
            content = daemon.client.pread(size, 0)
            if content != self.model:
                at = next(at for at, (is_, want) in enumerate(zip(content, self.model)) if is_ != want)
                raise Difference(f"{daemon.name}: the disk differs from the model at byte {at}")

    def end(self):
        self.flush()
        self.unexport()
        self.delete_nodes([name for name, _ in self.chain])
        for daemon in self.pair:
            nodes = daemon.command("query-named-block-nodes")
            if nodes:
                raise Difference(f"{daemon.name}: nodes are left: {[node['node-name'] for node in nodes]}")
        self.compare_images()

    def compare_images(self):
        contents = self.backups | {self.chain[-1][1]: bytes(self.model)}
        for _, file in self.chain[:-1]:
            contents[file] = None
        for file, content in contents.items():
            ours, theirs = (daemon.directory / file for daemon in self.pair)
            for image in (ours, theirs):
                run("qemu-img", "check", "-q", image)
            run("qemu-img", "compare", "-q", ours, theirs)
            if content is not None:
                expected = self.pair[0].directory / "expected.raw"
                expected.write_bytes(content)
                run("qemu-img", "compare", "-q", "-F", "raw", ours, expected)
            infos = [self.described(daemon, file) for daemon in self.pair]
            if infos[0] != infos[1]:
                raise Difference(f"{file}: {infos[0]} of weir, {infos[1]} of QEMU")

    def described(self, daemon, file):
        """What the header of an image and its bitmaps say, without the directory."""
        image = daemon.directory / file
        text = run("qemu-img", "info", "--output=json", image).replace(f"{daemon.directory}/", "DIR/")
        info = json.loads(text)
        bitmaps = info["format-specific"]["data"].get("bitmaps", [])
        return {
            "size": info["virtual-size"],
            "backing": (info.get("full-backing-filename"), info.get("backing-filename-format")),
            "snapshots": [snapshot["name"] for snapshot in info.get("snapshots", [])],
            "bitmaps": [
                (bitmap["name"], bitmap["granularity"], bitmap["flags"], marked_ranges(image, bitmap["name"]))
                for bitmap in sorted(bitmaps, key=lambda bitmap: bitmap["name"])
            ],
        }


def marked_ranges(image, bitmap):
    """The ranges that a persistent bitmap of a closed image marks."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory()) + "/s"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()
        # Socket activation, so that a client can connect at once.
        argv = ["sh", "-c", 'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@" 3<&0 </dev/null', "sh"]
        argv += ["qemu-nbd", "-r", "-f", "qcow2", "-B", bitmap, str(image)]
        server = subprocess.Popen(argv, stdin=listener)
        stack.callback(server.wait)
        client = nbd.NBD()
        client.add_meta_context(BITMAP + bitmap)
        client.connect_uri(f"nbd+unix://?socket={path}")
        ranges, at = [], 0

        def extents(_context, offset, entries, _error):
            nonlocal at
            at = offset
            for length, flags in zip(entries[::2], entries[1::2]):
                if flags and ranges and ranges[-1][1] == at:
                    ranges[-1][1] += length
                elif flags:
                    ranges.append([at, at + length])
                at += length

        while at < client.get_size():
            client.block_status(client.get_size() - at, at, extents)
        client.shutdown()
        return ranges


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weir", type=Path)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first history; later ones follow")
    parser.add_argument("--directory", type=Path, help="for the images, which stay then")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory.absolute() if arguments.directory else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = directory / "bin" / "qemu-storage-daemon"
        program.parent.mkdir(parents=True)
        program.symlink_to(arguments.weir.resolve())
        counts = collections.Counter()
        for seed in range(arguments.seed, arguments.seed + arguments.histories):
            at = directory / str(seed)
            at.mkdir()
            pair = [Daemon("weir", [program], at / "weir"), Daemon("QEMU", ["qemu-storage-daemon"], at / "qemu")]
            history = History(pair, seed)
            try:
                history.run()
                for daemon in pair:
                    daemon.stop()
            except (Difference, nbd.Error, OSError) as error:
                print(*history.log, sep="\n")
                print(f"seed {seed}: {error}")
                for daemon in pair:
                    daemon.process.kill()
                sys.exit(1)
            counts += history.counts
            if not arguments.directory:
                shutil.rmtree(at)
        print(f"{arguments.histories} histories are equal: {dict(sorted(counts.items()))}")


main()
