# Storage plugin of weir for Proxmox VE 9: the disks of machines are images in one directory (the
# pool), which a running `weir serve` exports over NBD at one Unix socket. docs/proxmox.md is the
# guide.
#
# QEMU sees the raw bytes of a disk, because weir decodes qcow2. So Proxmox VE sees raw volumes,
# whose names have no extension: the file of vm-100-disk-0 is POOL/vm-100-disk-0.qcow2.
#
# Never changes an image behind the daemon: the daemon changes images that it serves, `weir image`
# all others, and weir's locks exclude both at once. Never replaces a file or removes one that
# another volume needs.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
package PVE::Storage::Custom::WeirPlugin;

use v5.36;

use PVE::Storage::Custom::Weir::Command
    qw($PATH $GROUP $NAME pool nbd control weir image_info daemon_status disk_space qmp);
use PVE::Storage::Custom::Weir::Disk
    qw(served_disk add_disk remove_disk check_settings apply_settings);
use PVE::Storage::Custom::Weir::Pool
    qw(image_of existing_image images_of_pool overlays_of create_image rename_image remove_image
    free_name read_notes write_notes);

use parent qw(PVE::Storage::Plugin);

# Every method of the interface accepts further arguments: newer versions of Proxmox VE append some.

# Versions of the storage API that this file implements. 12 (Proxmox VE 9.0) is the first in which a
# plugin supplies options of QEMU's block devices and the method of snapshots.
use constant {
    API_MIN => 12,
    API_MAX => 15,
};

# Seconds for which QEMU's requests wait while weir restarts.
use constant RECONNECT_SECONDS => 60;

# Bytes of sun_path in unix(7), without the NUL.
use constant SOCKET_PATH_MAX => 107;

# ── Configuration ──

# The newest version that both sides implement: Proxmox VE refuses a plugin with a newer version
# than its own, and warns about an older one.
sub api ($class, @) {
    my $host    = PVE::Storage->can('APIVER');
    my $version = $host ? $host->() : API_MAX;
    return $version > API_MAX ? API_MAX : $version < API_MIN ? API_MIN : $version;
}

sub type ($class, @) { return 'weir' }

sub plugindata ($class, @) {
    return {
        content                => [{ images => 1 }, { images => 1 }],
        format                 => [{ raw    => 1 }, 'raw'],
        'sensitive-properties' => {},
    };
}

sub properties ($class, @) {
    my $path = sub ($description) {
        return { description => $description, type => 'string', format => 'pve-storage-path' };
    };
    return {
        'weir-pool'   => $path->('Directory of the images. New images get its owner and group.'),
        'weir-socket' => $path->('Unix socket of weir for NBD (default: /run/weir/nbd.sock).'),
        'weir-control' => $path->('Control socket of weir (default: /run/weir/qmp.sock).'),
        'weir-format'  => {
            description => 'Format of new images; only qcow2 has snapshots (default: qcow2).',
            type        => 'string',
            enum        => ['qcow2', 'raw'],
        },
        'weir-iops-total' => {
            description => 'Limit of each disk in operations per second.',
            type        => 'integer',
            minimum     => 1,
        },
        'weir-bps-total' => {
            description => 'Limit of each disk in bytes per second, such as 100M.',
            type        => 'string',
        },
        'weir-weight' => {
            description => 'Share of each disk in its group, relative to other weights there.',
            type        => 'integer',
            minimum     => 1,
            maximum     => 10_000,
        },
        'weir-group' => {
            description => 'Group of the daemon whose limits the disks share.',
            type        => 'string',
        },
    };
}

sub options ($class, @) {
    return {
        'weir-pool' => { fixed => 1 },
        map { $_ => { optional => 1 } } qw(
            weir-socket weir-control weir-format
            weir-iops-total weir-bps-total weir-weight weir-group
            content nodes disable bwlimit
        )
    };
}

sub check_config ($class, $storeid, $config, $create, $skip_schema = undef, @) {
    my $checked = $class->SUPER::check_config($storeid, $config, $create, $skip_schema);
    for my $key (grep { defined $checked->{$_} } qw(weir-pool weir-socket weir-control)) {
        my $value = $checked->{$key};
        die "$key: $value: must be an absolute path of letters, digits and _./- without ..\n"
            if $value !~ m{\A$PATH\z} || $value =~ m{/\.\.(?:/|\z)};
        die "$key: $value: longer than @{[SOCKET_PATH_MAX]} characters, the maximum for a socket\n"
            if $key ne 'weir-pool' && length $value > SOCKET_PATH_MAX;
    }
    my $rate = $checked->{'weir-bps-total'};
    die "weir-bps-total: $rate: must be a number of bytes, such as 100M\n"
        if defined $rate && $rate !~ m{\A[1-9][0-9]*[KMGT]?\z}i;
    my $group = $checked->{'weir-group'};
    die "weir-group: $group: must be a name of letters, digits and _.-\n"
        if defined $group && $group !~ m{\A$GROUP\z};
    return $checked;
}

# ── Storage ──

sub check_connection ($class, $storeid, $scfg, @) {
    return eval { daemon_status($scfg); 1 } ? 1 : 0;
}

sub activate_storage ($class, $storeid, $scfg, @) {
    my $pool = pool($scfg);
    die "$pool: not a directory (create it, with the daemon's user as its owner)\n" if !-d $pool;
    my $address = 'unix:' . nbd($scfg);
    my $status  = daemon_status($scfg);
    my $config  = $status->{config}
        // die "@{[control($scfg)]}: weir runs without a config file, so a restart would lose its"
        . " disks (start it with --config)\n";
    die "$address: weir does not serve NBD there (set nbd = \"$address\" in [daemon] of $config and"
        . " restart weir)\n"
        if !grep { ($_->{address} // '') eq $address } @{ $status->{servers} // [] };
    return 1;
}

sub deactivate_storage ($class, $storeid, $scfg, @) { return 1 }

sub status ($class, $storeid, $scfg, @) {
    return (disk_space($scfg), $class->check_connection($storeid, $scfg));
}

sub list_images ($class, $storeid, $scfg, $vmid = undef, $vollist = undef, @) {
    my $pool   = pool($scfg);
    my %wanted = map { $_ => 1 } @{ $vollist // [] };
    my @images;
    for my $image (images_of_pool($scfg)) {
        my ($name, $file) = @$image;
        my ($owner) = $name =~ m{\A[a-z]+-(\d+)-};
        next if defined $vmid && $owner != $vmid;
        # An image that weir cannot read is listed, so that users can remove it.
        my $info = eval { image_info($scfg, $file) } // do { warn "$name: $@"; {} };
        my ($parent) = ($info->{'full-backing-filename'} // '')
            =~ m{\A\Q$pool\E/(base-\d+-$NAME)\.(?:qcow2|raw)\z};
        my $volid = "$storeid:" . (defined $parent ? "$parent/" : '') . $name;
        next if $vollist && !$wanted{$volid};
        push @images,
            {
            volid  => $volid,
            vmid   => $owner,
            format => 'raw',
            size   => $info->{'virtual-size'} // 0,
            used   => $info->{'actual-size'}  // 0,
            parent => $parent,
            ctime  => (stat $file)[10],
            };
    }
    return \@images;
}

# Copies to other hosts would contain the image in place of the disk's bytes.
sub volume_export_formats ($class, @) { return () }
sub volume_import_formats ($class, @) { return () }

# ── Names and addresses of volumes ──

sub parse_volname ($class, $volname, @) {
    my ($base, $base_vmid, $name, $kind, $vmid) =
        $volname =~ m{\A(?:(base-(\d+)-$NAME)/)?((vm|base)-(\d+)-$NAME)\z}
        or die "$volname: not a volume of weir (names are vm-ID-NAME and base-ID-NAME)\n";
    return ('images', $name, $vmid, $base, $base_vmid, $kind eq 'base' ? 1 : undef, 'raw');
}

# Name of a volume, the prefix of a linked clone (`base-ID-NAME/`), and true for a base image.
my sub parts_of ($class, $volname) {
    my (undef, $name, undef, $base, undef, $is_base) = $class->parse_volname($volname);
    return ($name, defined $base ? "$base/" : '', $is_base);
}

my sub refuse_snapshot ($volname, $snapname) {
    die "$volname: a snapshot cannot be opened (copy it with `weir image convert -l $snapname`)\n"
        if defined $snapname;
    return;
}

sub filesystem_path ($class, $scfg, $volname, $snapname = undef, @) {
    refuse_snapshot($volname, $snapname);
    my ($vtype, $name, $vmid) = $class->parse_volname($volname);
    my ($file) = existing_image($scfg, $name);
    return wantarray ? ($file, $vmid, $vtype) : $file;
}

# The address of an active volume, for QEMU and its tools.
sub path ($class, $scfg, $volname, $storeid = undef, $snapname = undef, @) {
    refuse_snapshot($volname, $snapname);
    my ($vtype, $name, $vmid) = $class->parse_volname($volname);
    my $uri = "nbd+unix:///$name?socket=" . nbd($scfg);
    return wantarray ? ($uri, $vmid, $vtype) : $uri;
}

sub qemu_blockdev_options ($class, $scfg, $storeid, $volname, $version, $options = undef, @) {
    refuse_snapshot($volname, ($options // {})->{'snapshot-name'});
    my ($name) = parts_of($class, $volname);
    return {
        driver            => 'nbd',
        server            => { type => 'unix', path => nbd($scfg) },
        export            => "$name",
        'reconnect-delay' => int(RECONNECT_SECONDS),
    };
}

# ── Volumes ──

sub activate_volume ($class, $storeid, $scfg, $volname, $snapname = undef, @) {
    refuse_snapshot($volname, $snapname);
    my ($name, undef, $is_base) = parts_of($class, $volname);
    add_disk($scfg, $name, $is_base);
    return 1;
}

sub deactivate_volume ($class, $storeid, $scfg, $volname, $snapname = undef, @) {
    my ($name) = parts_of($class, $volname);
    remove_disk($scfg, $name) if !defined $snapname && image_of($scfg, $name);
    return 1;
}

sub alloc_image ($class, $storeid, $scfg, $vmid, $fmt, $name, $size, @) {
    die "$fmt: not a format of this storage (its volumes are raw for Proxmox VE; weir-format is the"
        . " format of their files)\n"
        if $fmt ne 'raw';
    die "$size: not a size in KiB\n" if $size !~ m{\A[1-9][0-9]*\z};
    $name //= free_name($scfg, $vmid);
    my ($own) = $name =~ m{\A(vm-\Q$vmid\E-$NAME)\z}
        or die "$name: a volume of machine $vmid must be named vm-$vmid-NAME\n";
    my $format = ($scfg->{'weir-format'} // 'qcow2') eq 'raw' ? 'raw' : 'qcow2';
    create_image($scfg, $own, $format, [], "${size}K");
    return $own;
}

sub free_image ($class, $storeid, $scfg, $volname, @) {
    my ($name) = parts_of($class, $volname);
    my ($file) = image_of($scfg, $name);
    if (!$file) {
        warn "$volname: has no image any more\n";
        return;
    }
    my @overlays = overlays_of($scfg, $file);
    die "$volname: is the backing file of @overlays (remove these first)\n" if @overlays;
    remove_disk($scfg, $name);
    remove_image($scfg, $name);
    return;
}

sub create_base ($class, $storeid, $scfg, $volname, @) {
    my ($name, $prefix, $is_base) = parts_of($class, $volname);
    die "$volname: is a base image already\n" if $is_base;
    my ($file) = existing_image($scfg, $name);
    die "$volname: has snapshots, which a base image must not have (delete them first)\n"
        if @{ image_info($scfg, $file)->{snapshots} // [] };
    my $base = $name =~ s{\Avm-}{base-}r;
    remove_disk($scfg, $name);
    rename_image($scfg, $name, $base);
    return $prefix . $base;
}

sub clone_image ($class, $scfg, $storeid, $volname, $vmid, $snap = undef, @) {
    my ($base, undef, $is_base) = parts_of($class, $volname);
    die "$volname: linked clones need a base image (convert the machine to a template, or make a"
        . " full clone)\n"
        if !$is_base || defined $snap;
    my (undef, $format) = existing_image($scfg, $base);
    my $name = free_name($scfg, $vmid);
    # A relative name of the backing file: the pool can be moved.
    create_image($scfg, $name, 'qcow2', ['-b', "$base.$format", '-F', $format]);
    return "$base/$name";
}

sub rename_volume ($class, $scfg, $storeid, $volname, $target_vmid, $target_volname = undef, @) {
    my ($name, $prefix, $is_base) = parts_of($class, $volname);
    die "$volname: a base image keeps its name, which its clones contain\n" if $is_base;
    $target_volname //= free_name($scfg, $target_vmid);
    my ($new_name) = parts_of($class, $target_volname);
    die "$target_volname: must be named vm-ID-NAME\n" if $new_name !~ m{\Avm-};
    existing_image($scfg, $name);
    remove_disk($scfg, $name);
    rename_image($scfg, $name, $new_name);
    return "$storeid:$prefix$new_name";
}

sub volume_size_info ($class, $scfg, $storeid, $volname, @) {
    my ($name) = parts_of($class, $volname);
    my ($file) = existing_image($scfg, $name);
    my $info = image_info($scfg, $file);
    return $info->{'virtual-size'} if !wantarray;
    my (undef, undef, undef, $base) = $class->parse_volname($volname);
    return ($info->{'virtual-size'}, 'raw', $info->{'actual-size'}, $base, (stat $file)[10]);
}

sub volume_resize ($class, $scfg, $storeid, $volname, $size, $running, $snapname = undef, @) {
    my ($name, undef, $is_base) = parts_of($class, $volname);
    die "$volname: a base image or a snapshot keeps its size\n" if $is_base || defined $snapname;
    # The step of Proxmox VE that follows would fail: NBD transmits the size only at the connection.
    die "$volname: QEMU cannot resize a disk over NBD while the machine runs (stop it first)\n"
        if $running;
    my ($file, $format) = existing_image($scfg, $name);
    my $current = image_info($scfg, $file)->{'virtual-size'};
    die "$volname: has $current bytes, of which a size of $size would lose the last ones\n"
        if $size < $current;
    # The daemon resizes the image if it serves it.
    weir($scfg, qw(image resize -q -f), $format, $file, int $size);
    return;
}

sub volume_has_feature (
    $class, $scfg, $feature, $storeid, $volname, $snapname = undef, $running = undef, $opts = undef,
    @)
{
    my ($name, undef, $is_base) = parts_of($class, $volname);
    my $of       = defined $snapname ? 'snapshot' : $is_base ? 'base' : 'current';
    my %features = (
        snapshot   => { current => 1, snapshot => 1 },
        clone      => { base    => 1 },
        template   => { current => 1 },
        copy       => { current => 1, base => 1 },
        sparseinit => { current => 1, base => 1 },
        rename     => { current => 1 },
    );
    return if !$features{$feature}{$of};
    my $targets = ($opts // {})->{valid_target_formats};
    return if $feature eq 'clone' && $targets && !grep { $_ eq 'raw' } @$targets;
    if ($feature eq 'snapshot') {
        my (undef, $format) = image_of($scfg, $name);
        return if ($format // '') ne 'qcow2';
    }
    return 1;
}

# ── Snapshots: internal ones of qcow2 ──

# QEMU cannot take them, because it sees raw bytes.
sub volume_qemu_snapshot_method ($class, $storeid, $scfg, $volname, @) { return 'storage' }

# Name and file of a volume that can have snapshots, and its snapshots by name.
my sub snapshots_of ($class, $scfg, $volname) {
    my ($name) = parts_of($class, $volname);
    my ($file, $format) = existing_image($scfg, $name);
    die "$volname: a raw image has no snapshots (convert it to qcow2)\n" if $format ne 'qcow2';
    my %snapshots = map { $_->{name} => $_ } @{ image_info($scfg, $file)->{snapshots} // [] };
    return ($name, $file, \%snapshots);
}

# weir prefers an id, which is a number, to an equal name.
my sub checked_snapshot ($snap) {
    return $1 if $snap =~ m{\A([A-Za-z_][A-Za-z0-9_-]*)\z};
    die "$snap: not a name of a snapshot (a letter, then letters, digits, - and _)\n";
}

sub volume_snapshot ($class, $scfg, $storeid, $volname, $snap, @) {
    $snap = checked_snapshot($snap);
    my ($name, $file, $snapshots) = snapshots_of($class, $scfg, $volname);
    die "$volname: has a snapshot $snap already (delete it, or choose another name)\n"
        if $snapshots->{$snap};
    my ($served) = served_disk($scfg, $name);
    if ($served) {
        qmp($scfg, 'blockdev-snapshot-internal-sync', device => $name, name => $snap);
    } else {
        weir($scfg, qw(image snapshot -q -c), $snap, $file);
    }
    return;
}

sub volume_snapshot_delete ($class, $scfg, $storeid, $volname, $snap, @) {
    $snap = checked_snapshot($snap);
    my ($name, $file, $snapshots) = snapshots_of($class, $scfg, $volname);
    # An earlier attempt may have deleted it and then failed at another disk of the machine.
    return if !$snapshots->{$snap};
    my ($served) = served_disk($scfg, $name);
    if ($served) {
        qmp($scfg, 'blockdev-snapshot-delete-internal-sync', device => $name, name => $snap);
    } else {
        weir($scfg, qw(image snapshot -q -d), $snap, $file);
    }
    return;
}

sub volume_rollback_is_possible ($class, $scfg, $storeid, $volname, $snap, @) {
    my (undef, undef, $snapshots) = snapshots_of($class, $scfg, $volname);
    die "$volname: has no snapshot $snap\n" if !$snapshots->{$snap};
    return 1;
}

# Leaves the volume inactive; Proxmox VE activates it at the start of the machine.
sub volume_snapshot_rollback ($class, $scfg, $storeid, $volname, $snap, @) {
    $snap = checked_snapshot($snap);
    my ($name, $file, $snapshots) = snapshots_of($class, $scfg, $volname);
    die "$volname: has no snapshot $snap\n" if !$snapshots->{$snap};
    remove_disk($scfg, $name);
    weir($scfg, qw(image snapshot -q -a), $snap, $file);
    return;
}

sub volume_snapshot_info ($class, $scfg, $storeid, $volname, @) {
    my ($name) = parts_of($class, $volname);
    my ($file, $format) = image_of($scfg, $name);
    return {} if !$file || $format ne 'qcow2';
    my %snapshots;
    for my $snapshot (@{ image_info($scfg, $file)->{snapshots} // [] }) {
        # An id alone is used again after a deletion.
        my $id = join '-', $snapshot->@{qw(id date-sec date-nsec)};
        $snapshots{ $snapshot->{name} } = { id => $id, timestamp => $snapshot->{'date-sec'} };
    }
    return \%snapshots;
}

# ── Limits of one disk: its notes ──

sub get_volume_attribute ($class, $scfg, $storeid, $volname, $attribute, @) {
    return if $attribute ne 'notes';
    my ($name) = parts_of($class, $volname);
    return read_notes($scfg, $name) // '';
}

# The daemon decides if settings fit together. It serves an inactive volume for a moment to check
# them. If they do not, the old notes stay in force.
sub update_volume_attribute ($class, $scfg, $storeid, $volname, $attribute, $value, @) {
    die "$attribute: weir has only notes, which are the limits of the disk\n"
        if $attribute ne 'notes';
    my ($name) = parts_of($class, $volname);
    existing_image($scfg, $name);
    my $notes = ($value // '') =~ m{\S} ? $value : undef;
    check_settings($notes);
    my $old = read_notes($scfg, $name);
    my ($served, $saved) = served_disk($scfg, $name);
    write_notes($scfg, $name, $notes);
    my $applied = eval {
        if ($served) {
            apply_settings($scfg, $served, $saved);
        } else {
            $class->activate_volume($storeid, $scfg, $volname);
            $class->deactivate_volume($storeid, $scfg, $volname);
        }
        1;
    };
    return if $applied;
    my $error = $@;
    write_notes($scfg, $name, $old);
    die $error;
}

1;
