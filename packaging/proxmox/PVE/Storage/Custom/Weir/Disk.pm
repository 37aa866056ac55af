# Disks of the daemon: a volume is active while the daemon serves its image under its name.
#
# Never removes a disk from the daemon while a client uses it.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
package PVE::Storage::Custom::Weir::Disk;

use v5.36;

use Exporter qw(import);

use PVE::Storage::Custom::Weir::Command qw(nbd control weir daemon_status);
use PVE::Storage::Custom::Weir::Pool    qw(existing_image image_of same_file read_notes);

our @EXPORT_OK = qw(served_disk add_disk remove_disk check_settings apply_settings);

# Attempts to remove a disk that a client still uses, and their interval in seconds: weir sees the
# end of a QEMU process a moment after Proxmox VE.
use constant {
    REMOVE_ATTEMPTS => 5,
    REMOVE_INTERVAL => 0.1,
};

# Settings of a disk, in the order for `weir throttle`, with the values that remove them.
my @SETTINGS = (
    (
        map { ["$_", 0], ["$_-max", 0], ["$_-max-length", 1] }
            map { ("$_-total", "$_-read", "$_-write") } qw(iops bps)
    ),
    ['iops-size',        0],
    ['iops-reservation', 0],
    ['bps-reservation',  0],
    ['latency-target',   0],
    ['weight',           100],
    ['group',            undef],
);
my %IS_SETTING = map { $_->[0] => 1 } @SETTINGS;

# The settings of notes, `key=value` separated by commas or white space. Notes without any are
# undef.
my sub settings_in ($notes) {
    my %settings;
    for my $part (grep { length } split m{[\s,]+}, $notes // '') {
        my ($key, $value) = $part =~ m{\A([a-z-]+)=([A-Za-z0-9_.-]+)\z}
            or die "$part: not a setting of a disk (write key=value, such as iops-total=500)\n";
        die "$key: not a setting of a disk (known are @{[sort keys %IS_SETTING]})\n"
            if !$IS_SETTING{$key};
        die "$key: set twice (remove one)\n" if exists $settings{$key};
        $settings{$key} = $value;
    }
    return %settings ? \%settings : undef;
}

# Dies if notes contain anything but settings.
sub check_settings ($notes) {
    settings_in($notes);
    return;
}

# Settings of a volume: those of its notes, or else all defaults of the storage. They are not mixed,
# because a total limit of the storage would exclude a limit on reads of the notes.
my sub settings_of ($scfg, $name) {
    return settings_in(read_notes($scfg, $name)) // {
        map { defined $scfg->{"weir-$_"} ? ($_ => $scfg->{"weir-$_"}) : () }
            qw(iops-total bps-total weight group)
    };
}

# The served disk of a volume, as in the daemon's status, or undef; and whether the daemon's config
# file has it. Dies if the name belongs to another image, or the image to another disk.
sub served_disk ($scfg, $name) {
    my $status = daemon_status($scfg);
    my $saved  = 0;
    if (defined $status->{config} && open my $config, '<', $status->{config}) {
        $saved = grep { m{\A\s*\[\s*disk\.(["']?)\Q$name\E\1\s*\]} } <$config>;
        close $config;
    }
    my ($waiting) = grep { $_->{name} eq $name } @{ $status->{unavailable} // [] };
    die "$name: weir has not opened its image yet: $waiting->{reason}\n" if $waiting;
    my ($file) = image_of($scfg, $name);
    my ($named) = grep { $_->{name} eq $name } @{ $status->{disks} };
    my $uses = sub ($disk) { defined $file && same_file($disk->{path} // '', $file) };
    my ($using) = grep { $uses->($_) } @{ $status->{disks} };
    die "$name: the daemon at @{[control($scfg)]} serves $named->{image} under this name (each"
        . " storage of a host needs a daemon of its own)\n"
        if $named && !$uses->($named);
    die "$file: in use: the daemon serves it as the disk $using->{name} (remove that disk)\n"
        if $using && !$named;
    return ($named, $saved);
}

# Removes the volume's disk from the daemon and its config file. Does nothing if it is not served.
sub remove_disk ($scfg, $name) {
    my ($disk) = served_disk($scfg, $name);
    return if !$disk;
    for my $attempt (1 .. REMOVE_ATTEMPTS) {
        return if eval { weir($scfg, qw(disk remove --save --json), $name); 1 };
        my $error = $@;
        die $error if $attempt == REMOVE_ATTEMPTS || $error !~ m{in use};
        select undef, undef, undef, REMOVE_INTERVAL;
    }
    return;
}

# Serves the volume's image, if it is not served yet.
sub add_disk ($scfg, $name, $read_only) {
    my ($file, $format) = existing_image($scfg, $name);
    my ($disk, $saved) = served_disk($scfg, $name);
    if ($disk) {
        return if $saved || $disk->{connections};
        # Of an activation that was interrupted before it saved the disk: a restart of the daemon
        # would lose it.
        remove_disk($scfg, $name);
    }
    my $settings = settings_of($scfg, $name);
    my @keys     = grep { defined $settings->{$_} } map { $_->[0] } @SETTINGS;
    my @options  = map { ("--$_", $settings->{$_}) } @keys;
    push @options, '--read-only' if $read_only;
    push @options, '--save'      if !$saved;
    my $nbd = 'unix:' . nbd($scfg);
    unshift @options, '-f', $format, '--nbd', $nbd;
    return if eval { weir($scfg, qw(disk add --json), $name, $file, @options); 1 };
    my $error = $@;
    # Another task may have activated the volume meanwhile.
    my ($added) = eval { served_disk($scfg, $name) };
    die "$name: $error" if !$added;
    return;
}

# Changes a served disk, as in the daemon's status, to the settings of its volume, and removes those
# that the volume lacks.
sub apply_settings ($scfg, $disk, $saved) {
    my $name     = $disk->{name};
    my $settings = settings_of($scfg, $name);
    my %present  = (%$disk, $disk->{limits}->%*);
    my @options;
    for my $setting (@SETTINGS) {
        my ($key, $none) = @$setting;
        my $value = $settings->{$key} // (defined $present{$key} ? $none : undef);
        push @options, "--$key", $value if defined $value;
    }
    push @options, '--no-group' if defined $disk->{group} && !defined $settings->{group};
    push @options, '--save'     if $saved;
    weir($scfg, 'throttle', $name, @options);
    return;
}

1;
