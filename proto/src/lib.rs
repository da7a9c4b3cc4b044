//! The protocol of hub and agent, `krypton.fleet.v1`: the generated messages, their conversion to `krypton-types`, and
//! the versions that work together.
//!
//! The crate is independent of sessions, stores and clocks.

mod convert;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod skew;

/// Package `krypton.fleet.v1`, as generated.
pub mod v1 {
    #![allow(
        clippy::large_enum_variant,
        reason = "a session handles one message at a time, and most have the largest size"
    )]
    #![allow(clippy::too_many_lines, reason = "generated")]
    tonic::include_proto!("krypton.fleet.v1");
}

pub use convert::WireError;
/// Type of protobuf fields of type `bytes`.
pub use prost::bytes::Bytes;

/// The largest message that an agent may send, in bytes: a few hundred reports.
pub const AGENT_MESSAGE_MAX: usize = 1 << 20;
/// The largest message that the hub may send, in bytes. A desired state must also fit into a Secret (1 MiB) on the
/// member.
pub const HUB_MESSAGE_MAX: usize = 4 << 20;
/// Reports per message. At 1 KiB per condition and for the labels, they stay below [`AGENT_MESSAGE_MAX`]. The report of
/// a KryptonDeployment contains up to 8 KiB of revisions and counts as several.
pub const REPORTS_PER_MESSAGE: usize = 200;
/// Bytes in one part of a chart.
pub const CHUNK: usize = 64 * 1024;
