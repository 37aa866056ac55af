//! A block device by ublk with as little around it as can be, in each way that the driver moves
//! data, and a client that says what a request took.
//!
//! ```text
//! ublk-ways serve lent|user-copy|zero-copy DISK   a device over a block device, or over `null`
//! ublk-ways ask DEVICE read|write BYTES COUNT     prints nanoseconds a request, one after the other
//! ublk-ways remove DEVICE                         of a server that was killed
//! ```
//!
//! Why: which way is cheaper, and by how much, with nothing of weir's around it. In a guest whose
//! clock counts instructions (`run.py` beside this) the figures are the same on any machine.
//!
//! It prints `ready` when the device is there, and serves one queue until it is killed. Not for
//! data that anybody wants to keep.

use std::{
    env,
    error::Error,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    process, ptr, thread,
    time::Instant,
};

use io_uring::{IoUring, cqueue, opcode, squeue, types};

const DEPTH: u16 = 16;
const MOST_BYTES: u32 = 1 << 20;
const DEVICE_BYTES: u64 = 64 << 20;
const PAGE: usize = 4096;
const SECTOR: u64 = 512;

/// `UBLK_F_…`
const USER_COPY: u64 = 1 << 7;
const AUTO_BUF_REG: u64 = 1 << 11;

/// Commands of linux/ublk_cmd.h, numbered as ioctls.
const ADD: u32 = code(0x04, 32);
const DELETE: u32 = code(0x05, 32);
const START: u32 = code(0x06, 32);
const SET_PARAMS: u32 = code(0x08, 32);
const FETCH: u32 = code(0x20, 16);
const COMMIT_AND_FETCH: u32 = code(0x21, 16);

const fn code(number: u32, bytes: u32) -> u32 {
    3 << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", way, disk] => serve(Way::named(way)?, disk),
        ["ask", device, operation, bytes, count] => {
            let nanos = ask(device, operation == "write", bytes.parse()?, count.parse()?)?;
            println!("{nanos}");
            Ok(())
        }
        ["remove", device] => {
            let number = device.strip_prefix("/dev/ublkb").ok_or("not a device of ublk")?.parse()?;
            Ok(Control::open()?.tell(DELETE, number, 0, &mut [])?)
        }
        _ => {
            Err("usage: ublk-ways serve WAY DISK | ask DEVICE read|write BYTES COUNT | remove DEVICE".into())
        }
    }
}

/// How data comes from the kernel, and goes there.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// The kernel copies to and from memory of ours.
    Lent,
    /// We copy, by `pread` and `pwrite`.
    UserCopy,
    /// Nobody does: the kernel's pages are a buffer of the ring.
    ZeroCopy,
}

impl Way {
    fn named(name: &str) -> Outcome<Self> {
        match name {
            "lent" => Ok(Self::Lent),
            "user-copy" => Ok(Self::UserCopy),
            "zero-copy" => Ok(Self::ZeroCopy),
            _ => Err(format!("{name}: not lent, user-copy or zero-copy").into()),
        }
    }

    fn feature(self) -> u64 {
        match self {
            Self::Lent => 0,
            Self::UserCopy => USER_COPY,
            Self::ZeroCopy => AUTO_BUF_REG,
        }
    }
}

/// The nanoseconds of a request, each of which begins when the one before has ended.
fn ask(device: &str, writes: bool, bytes: usize, count: u64) -> Outcome<u64> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(device)?;
    let mut room = Room::new(bytes)?;
    let places = DEVICE_BYTES / bytes as u64;
    let mut go = |count: u64| {
        (0..count).try_for_each(|number| {
            let offset = number % places * bytes as u64;
            match writes {
                true => file.write_all_at(room.bytes(), offset),
                false => file.read_exact_at(room.bytes(), offset),
            }
        })
    };
    // Memory is given when it is touched first: each of 128 tags has had a request before.
    go((40 << 20) / (bytes as u64).clamp(256 << 10, 1 << 20))?;
    let begin = Instant::now();
    go(count)?;
    Ok(u64::try_from(begin.elapsed().as_nanos())? / count)
}

/// Memory at a page's beginning.
struct Room {
    first: *mut u8,
    length: usize,
}

impl Room {
    fn new(length: usize) -> io::Result<Self> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
        );
        map(length, protection, flags, -1).map(|first| Self { first, length })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped with this length, for good; borrowed as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.length) }
    }
}

fn map(length: usize, protection: i32, flags: i32, file: i32) -> io::Result<*mut u8> {
    // SAFETY: a new mapping, where the kernel wants it.
    match unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, file, 0) } {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        first => Ok(first.cast()),
    }
}

/// Makes the device, and serves it.
fn serve(way: Way, disk: &str) -> Outcome<()> {
    let mut control = Control::open()?;
    let number = control.add(way)?;
    control.set_params(number)?;
    let disk = match disk {
        "null" => None,
        path => Some(OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?),
    };
    let queue = Queue::open(way, number, disk)?;
    thread::spawn(move || match control.tell(START, number, u64::from(process::id()), &mut []) {
        Ok(()) => println!("ready /dev/ublkb{number}"),
        Err(error) => {
            eprintln!("ublk-ways: /dev/ublkb{number}: {error}");
            process::exit(1);
        }
    });
    queue.run()
}

struct Control {
    driver: File,
    ring: IoUring<squeue::Entry128>,
}

impl Control {
    fn open() -> io::Result<Self> {
        let driver = OpenOptions::new().read(true).write(true).open("/dev/ublk-control")?;
        Ok(Self { driver, ring: IoUring::builder().build(4)? })
    }

    /// `struct ublksrv_ctrl_dev_info`
    fn add(&mut self, way: Way) -> Outcome<u32> {
        let mut info = [0_u8; 64];
        info[..2].copy_from_slice(&1_u16.to_ne_bytes());
        info[2..4].copy_from_slice(&DEPTH.to_ne_bytes());
        info[8..12].copy_from_slice(&MOST_BYTES.to_ne_bytes());
        info[12..16].copy_from_slice(&u32::MAX.to_ne_bytes());
        info[24..32].copy_from_slice(&way.feature().to_ne_bytes());
        self.tell(ADD, u32::MAX, 0, &mut info)?;
        let features = u64::from_ne_bytes(info[24..32].try_into()?);
        let number = u32::from_ne_bytes(info[12..16].try_into()?);
        if features & way.feature() != way.feature() {
            self.tell(DELETE, number, 0, &mut [])?;
            return Err("this kernel's driver does not have that way".into());
        }
        Ok(number)
    }

    /// `struct ublk_params`, of which the basic part
    fn set_params(&mut self, number: u32) -> io::Result<()> {
        let mut params = [0_u8; 64];
        params[..4].copy_from_slice(&64_u32.to_ne_bytes());
        params[4] = 1;
        // Blocks of 512 bytes, in pages.
        params[12..16].copy_from_slice(&[9, 12, 12, 12]);
        params[16..20].copy_from_slice(&(MOST_BYTES / SECTOR as u32).to_ne_bytes());
        params[24..32].copy_from_slice(&(DEVICE_BYTES / SECTOR).to_ne_bytes());
        self.tell(SET_PARAMS, number, 0, &mut params)
    }

    fn tell(&mut self, code: u32, number: u32, data: u64, value: &mut [u8]) -> io::Result<()> {
        let mut command = [0; 80];
        command[..4].copy_from_slice(&number.to_ne_bytes());
        command[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        command[6..8].copy_from_slice(&(value.len() as u16).to_ne_bytes());
        command[8..16].copy_from_slice(&(value.as_mut_ptr() as u64).to_ne_bytes());
        command[16..24].copy_from_slice(&data.to_ne_bytes());
        let driver = types::Fd(self.driver.as_raw_fd());
        let entry = opcode::UringCmd80::new(driver, code).cmd(command).build();
        // SAFETY: what it points to is borrowed until it has completed, which is awaited.
        unsafe { self.ring.submission().push(&entry) }.expect("it is empty");
        self.ring.submit_and_wait(1)?;
        match self.ring.completion().next().expect("awaited").result() {
            0.. => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }
}

/// What a request asks (`struct ublksrv_io_desc`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    operation: u32,
    sectors: u32,
    first_sector: u64,
    address: u64,
}

struct Queue {
    way: Way,
    device: File,
    disk: Option<File>,
    ring: IoUring,
    descriptors: *const Descriptor,
    rooms: Vec<Room>,
}

/// In what a completion is known by, beside the tag: it is the disk's.
const OF_DISK: u64 = 1 << 32;

impl Queue {
    fn open(way: Way, number: u32, disk: Option<File>) -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open(format!("/dev/ublkc{number}"))?;
        // As the rings of weir's workers are.
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(64)?;
        if way == Way::ZeroCopy {
            ring.submitter().register_buffers_sparse(u32::from(DEPTH))?;
        }
        let descriptors = map(PAGE, libc::PROT_READ, libc::MAP_SHARED, device.as_raw_fd())?.cast();
        let rooms = (0..DEPTH).map(|_| Room::new(MOST_BYTES as usize)).collect::<io::Result<_>>()?;
        Ok(Self { way, device, disk, ring, descriptors, rooms })
    }

    fn run(mut self) -> Outcome<()> {
        for tag in 0..DEPTH {
            self.step(FETCH, tag, 0);
        }
        let mut done: Vec<cqueue::Entry> = Vec::new();
        loop {
            self.ring.submit_and_wait(1)?;
            done.extend(self.ring.completion());
            for completion in done.drain(..) {
                let tag = completion.user_data() as u16;
                if completion.user_data() & OF_DISK != 0 {
                    self.answer(tag, completion.result());
                } else if completion.result() == 0 {
                    self.begin(tag);
                } else {
                    return Err(io::Error::from_raw_os_error(-completion.result()).into());
                }
            }
        }
    }

    fn descriptor(&self, tag: u16) -> Descriptor {
        // SAFETY: so many are mapped, and the kernel leaves one alone while we have its request.
        unsafe { self.descriptors.add(usize::from(tag)).read_volatile() }
    }

    /// Asks the disk, if there is one.
    fn begin(&mut self, tag: u16) {
        let Descriptor { operation, sectors, first_sector, .. } = self.descriptor(tag);
        let bytes = sectors * SECTOR as u32;
        let writes = operation & 0xff == 1;
        let is_data = operation & 0xff < 2;
        if is_data && writes && self.way == Way::UserCopy {
            let place = self.place(tag);
            let data = &mut self.rooms[usize::from(tag)].bytes()[..bytes as usize];
            self.device.read_exact_at(data, place).expect("the request's data");
        }
        let Some(disk) = self.disk.as_ref().filter(|_| is_data) else {
            return self.answer(tag, bytes as i32);
        };
        let (disk, offset) = (types::Fd(disk.as_raw_fd()), first_sector * SECTOR);
        let room = self.rooms[usize::from(tag)].first;
        let entry = match (self.way, writes) {
            (Way::ZeroCopy, false) => {
                opcode::ReadFixed::new(disk, ptr::null_mut(), bytes, tag).offset(offset).build()
            }
            (Way::ZeroCopy, true) => {
                opcode::WriteFixed::new(disk, ptr::null(), bytes, tag).offset(offset).build()
            }
            (_, false) => opcode::Read::new(disk, room, bytes).offset(offset).build(),
            (_, true) => opcode::Write::new(disk, room, bytes).offset(offset).build(),
        };
        self.push(entry.user_data(OF_DISK | u64::from(tag)));
    }

    fn answer(&mut self, tag: u16, result: i32) {
        let is_read = self.descriptor(tag).operation & 0xff == 0;
        if is_read && self.way == Way::UserCopy && result > 0 {
            let place = self.place(tag);
            let data = &mut self.rooms[usize::from(tag)].bytes()[..result as usize];
            self.device.write_all_at(data, place).expect("the request's data");
        }
        self.step(COMMIT_AND_FETCH, tag, result);
    }

    /// Where a request's data is in the driver's file (`UBLKSRV_IO_BUF_OFFSET`).
    fn place(&self, tag: u16) -> u64 {
        (1 << 31) + (u64::from(tag) << 25)
    }

    fn step(&mut self, code: u32, tag: u16, result: i32) {
        let mut command = [0; 16];
        command[2..4].copy_from_slice(&tag.to_ne_bytes());
        command[4..8].copy_from_slice(&result.to_ne_bytes());
        if self.way == Way::Lent {
            let room = self.rooms[usize::from(tag)].first as u64;
            command[8..].copy_from_slice(&room.to_ne_bytes());
        }
        let mut entry =
            opcode::UringCmd16::new(types::Fd(self.device.as_raw_fd()), code).cmd(command).build();
        if self.way == Way::ZeroCopy {
            // `struct ublk_auto_buf_reg`: the index in the table of buffers; the rest is zero.
            // SAFETY: an entry is the kernel's `struct io_uring_sqe`, whose `addr` is its third
            // eight bytes.
            unsafe { (&raw mut entry).cast::<u64>().add(2).write(u64::from(tag)) };
        }
        self.push(entry.user_data(u64::from(tag)));
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: rooms, disk and device are there as long as the ring is.
        unsafe { self.ring.submission().push(&entry) }.expect("there is room for what each tag does");
    }
}
