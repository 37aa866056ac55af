# Stand-in for PVE::Storage::Plugin of Proxmox VE, the base class of storage plugins.
#
# Has only `check_config`, which checks a section of storage.cfg against `properties` and `options`
# of the plugin. All other methods are missing, so a test fails if the plugin relies on one.
package PVE::Storage::Plugin;

use v5.36;

# Properties that the original defines for all plugins.
my %COMMON = map { $_ => { type => 'string' } } qw(content nodes disable bwlimit);

sub check_config ($class, $storeid, $config, $create, $skip_schema) {
    my %properties = (%COMMON, $class->properties->%*);
    my $options    = $class->options;
    for my $key (sort keys %$config) {
        next if $key eq 'type';
        die "$key: unexpected property\n" if !$options->{$key};
        die "$key: fixed\n"               if $options->{$key}{fixed} && !$create;
        my ($schema, $value) = ($properties{$key}, $config->{$key});
        die "$key: no schema\n" if !$schema || !$schema->{type};
        die "$key: not an integer\n" if $schema->{type} eq 'integer' && $value !~ m{\A-?\d+\z};
        die "$key: below $schema->{minimum}\n"
            if defined $schema->{minimum} && $value < $schema->{minimum};
        die "$key: above $schema->{maximum}\n"
            if defined $schema->{maximum} && $value > $schema->{maximum};
        die "$key: not one of @{$schema->{enum}}\n"
            if $schema->{enum} && !grep { $_ eq $value } @{ $schema->{enum} };
        die "$key: not an absolute path\n"
            if ($schema->{format} // '') eq 'pve-storage-path' && $value !~ m{\A/};
    }
    for my $key (sort keys %$options) {
        die "$key: missing\n" if $create && !$options->{$key}{optional} && !defined $config->{$key};
    }
    return {%$config};
}

1;
