# Files of a pool: the image of each volume, and the notes with its limits.
#
# Gives names only by link and unlink, so that no call replaces the image of another volume, and an
# interrupted call can be repeated. Never opens an image; weir does.
#
# SPDX-License-Identifier: MIT OR Apache-2.0
package PVE::Storage::Custom::Weir::Pool;

use v5.36;

use Errno qw(ENOENT);
use Exporter qw(import);
use IO::Handle;

use PVE::Storage::Custom::Weir::Command qw($NAME pool weir image_info);

our @EXPORT_OK = qw(image_of existing_image images_of_pool overlays_of same_file create_image
    rename_image remove_image free_name read_notes write_notes);

# weir's limit for names of disks, in characters.
use constant DISK_NAME_MAX => 31;

# As many disks of one machine as Proxmox VE manages.
use constant DISKS_MAX => 1024;

# The image of a volume: its file and format, or nothing if it does not exist.
sub image_of ($scfg, $name) {
    my $pool  = pool($scfg);
    my @found = grep { -e $_->[0] } map { ["$pool/$name.$_", $_] } qw(qcow2 raw);
    die "$pool: both $name.qcow2 and $name.raw exist (move the one that is not the disk away)\n"
        if @found > 1;
    return @found ? @{ $found[0] } : ();
}

# The same; dies if it does not exist.
sub existing_image ($scfg, $name) {
    my ($file, $format) = image_of($scfg, $name);
    die "$name: no image in @{[pool($scfg)]} (neither $name.qcow2 nor $name.raw)\n" if !$file;
    return ($file, $format);
}

# Names of all files of the pool.
my sub files_of_pool ($scfg) {
    my $pool = pool($scfg);
    opendir my $directory, $pool or die "$pool: $!\n";
    my @files = sort readdir $directory;
    closedir $directory;
    return @files;
}

# Names, files and formats of the images of all volumes.
sub images_of_pool ($scfg) {
    my $pool = pool($scfg);
    return map { m{\A((?:vm|base)-\d+-$NAME)\.(qcow2|raw)\z} ? [$1, "$pool/$1.$2", $2] : () }
        files_of_pool($scfg);
}

# Names of all qcow2 files of the pool whose backing file is `file`. Dies if one cannot be read,
# because its backing file may be that one.
sub overlays_of ($scfg, $file) {
    my $pool = pool($scfg);
    my @overlays;
    for my $candidate (map { m{\A([^.].*\.qcow2)\z} ? $1 : () } files_of_pool($scfg)) {
        next if "$pool/$candidate" eq $file;
        my $backing = image_info($scfg, "$pool/$candidate")->{'full-backing-filename'};
        push @overlays, $candidate if defined $backing && same_file($backing, $file);
    }
    return @overlays;
}

# True if both names lead to one existing file.
sub same_file ($one, $two) {
    my @one = stat $one;
    my @two = stat $two;
    return @one && @two && $one[0] == $two[0] && $one[1] == $two[1];
}

sub check_length ($name) {
    die "$name: longer than the @{[DISK_NAME_MAX]} characters of a disk's name (choose a shorter"
        . " name; of a snapshot with RAM, too)\n"
        if length $name > DISK_NAME_MAX;
    return;
}

# The first name for a disk of a machine that no image has.
sub free_name ($scfg, $vmid) {
    my ($id) = $vmid =~ m{\A([1-9][0-9]*)\z} or die "$vmid: not the number of a machine\n";
    my %used = map { $_->[0] => 1 } images_of_pool($scfg);
    for my $disk (map { "$id-disk-$_" } 0 .. DISKS_MAX - 1) {
        return "vm-$disk" if !$used{"vm-$disk"} && !$used{"base-$disk"};
    }
    die "$id: has @{[DISKS_MAX]} disks in @{[pool($scfg)]} already (remove some)\n";
}

# Makes names that were created or removed durable.
my sub sync_pool ($scfg) {
    my $pool = pool($scfg);
    open my $directory, '<', $pool or die "$pool: $!\n";
    $directory->sync               or die "$pool: fsync: $!\n";
    close $directory               or die "$pool: $!\n";
    return;
}

# Gives a file another name. Never replaces a file; completes an interrupted call.
my sub move_file ($from, $to) {
    if (!link $from, $to) {
        my $error = $!;
        die "$to: cannot be made of $from: $error\n" if !same_file($from, $to);
    }
    unlink $from or die "$from: $!\n";
    return;
}

# Removes a file if it exists.
my sub remove_file ($file) {
    die "$file: $!\n" if !unlink($file) && !$!{ENOENT};
    return;
}

# Creates an image with further arguments of `weir image create`: those before the file, and the
# size. The file gets its name when it is complete; an interrupted call leaves a hidden file, which
# the next attempt replaces.
sub create_image ($scfg, $name, $format, $options, $size = undef) {
    check_length($name);
    my $pool = pool($scfg);
    my ($existing) = image_of($scfg, $name);
    die "$existing: already exists (remove its volume, or choose another name)\n" if $existing;
    my $new     = "$pool/.$name.$format.new";
    my $created = eval {
        remove_file($new);
        weir($scfg, qw(image create -q -f), $format, @$options, $new, $size // ());
        my (undef, undef, undef, undef, $user, $group) = stat $pool or die "$pool: $!\n";
        # The daemon, which runs as another user than Proxmox VE, opens the image.
        chown $user, $group, $new or die "$new: chown: $!\n";
        chmod 0600, $new or die "$new: chmod: $!\n";
        move_file($new, "$pool/$name.$format");
        sync_pool($scfg);
        1;
    };
    return if $created;
    my $error = $@;
    unlink $new;
    die $error;
}

my sub notes_file ($scfg, $name) { return pool($scfg) . "/$name.limits" }

# Renames an image that is not in use, with its notes. The image is last: after an interruption the
# volume has its old name.
sub rename_image ($scfg, $name, $new_name) {
    check_length($new_name);
    my ($file, $format) = existing_image($scfg, $name);
    my ($existing) = image_of($scfg, $new_name);
    die "$existing: already exists (choose another name)\n"
        if $existing && !same_file($existing, $file);
    my ($notes, $new_notes) = map { notes_file($scfg, $_) } $name, $new_name;
    move_file($notes, $new_notes) if -e $notes;
    move_file($file, pool($scfg) . "/$new_name.$format");
    sync_pool($scfg);
    return;
}

# Removes an image that is not in use, with its notes.
sub remove_image ($scfg, $name) {
    my ($file) = existing_image($scfg, $name);
    remove_file(notes_file($scfg, $name));
    remove_file($file);
    sync_pool($scfg);
    return;
}

# The notes of a volume, or undef if it has none.
sub read_notes ($scfg, $name) {
    my $file = notes_file($scfg, $name);
    open my $handle, '<', $file or return $!{ENOENT} ? undef : die "$file: $!\n";
    local $/ = undef;
    my $text = <$handle>;
    close $handle or die "$file: $!\n";
    return $text;
}

# Replaces the notes of a volume; undef removes them. A crash leaves the old or the new ones.
sub write_notes ($scfg, $name, $text) {
    my $file = notes_file($scfg, $name);
    if (defined $text) {
        my $new = pool($scfg) . "/.$name.limits.new";
        open my $handle, '>', $new or die "$new: $!\n";
        my $written = print {$handle} $text;
        $written &&= $handle->flush && $handle->sync;
        $written = close($handle) && $written;
        if (!$written || !rename $new, $file) {
            my $error = $!;
            unlink $new;
            die "$file: $error\n";
        }
    } else {
        remove_file($file);
    }
    sync_pool($scfg);
    return;
}

1;
