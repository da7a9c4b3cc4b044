//! Compares the clocks of an API server, this machine and the leading hub.

use hyper::Request;
use hyper::header::DATE;
use jiff::fmt::rfc2822::DateTimeParser;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::client::Body;

use crate::explain::sources::{Lookup, lookup};
use crate::home::Connection;
use crate::local_clock::LocalClock;

/// Returns how far the clock of the API server is ahead of `clock`. `None` if its response has no valid date.
pub(super) async fn ahead(cluster: &Connection, clock: LocalClock) -> Option<SignedDuration> {
    let request = Request::get("/version").body(Body::empty()).ok()?;
    let sent = clock.now();
    let response = lookup(cluster, "get /version", cluster.client.send(request)).await;
    let received = clock.now();
    let Lookup::Found(response) = response else {
        return None;
    };
    let date = response.headers().get(DATE)?.to_str().ok()?;
    let date = DateTimeParser::new().parse_timestamp(date).ok()?;
    Some(difference(date, sent, received))
}

/// Returns how far the clock of the API server was ahead of the leading hub's at the last renewal of its Lease, which
/// both record. `None` if no hub holds the Lease, or the API server has not recorded the renewal.
pub(super) fn ahead_of_leader(lease: &Lease) -> Option<SignedDuration> {
    let spec = lease.spec.as_ref()?;
    let is_held = spec
        .holder_identity
        .as_ref()
        .is_some_and(|holder| !holder.is_empty());
    let renewed = spec.renew_time.as_ref().filter(|_| is_held)?.0;
    // A renewal may take a fifth of the Lease's duration.
    let duration = spec.lease_duration_seconds.unwrap_or_default();
    let longest = SignedDuration::from_secs(i64::from(duration) / 5 + 1);
    let entries = lease.metadata.managed_fields.iter().flatten();
    let renewals = entries.filter(|entry| {
        let fields = entry.fields_v1.as_ref();
        fields.is_some_and(|fields| fields.0.pointer("/f:spec/f:renewTime").is_some())
    });
    let stored = renewals.filter_map(|entry| entry.time.as_ref()).max()?.0;
    Some(difference(stored, renewed, renewed + longest))
}

/// Returns the smallest difference that explains the `date`, which has whole seconds, of a response.
fn difference(date: Timestamp, sent: Timestamp, received: Timestamp) -> SignedDuration {
    let end_of_second = date.duration_since(sent) + SignedDuration::from_secs(1);
    let from_receipt = date.duration_since(received);
    SignedDuration::ZERO.min(end_of_second).max(from_receipt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_allows_for_duration_of_request() {
        let at = |millisecond| Timestamp::from_millisecond(millisecond).unwrap();
        for (date, sent, received, expected) in [
            (10_000, 10_500, 10_600, 0),
            (10_000, 10_900, 11_100, 0),
            (10_000, 8_000, 10_000, 0),
            (10_000, 8_000, 9_000, 1_000),
            (10_000, 11_000, 12_000, 0),
            (10_000, 14_500, 14_600, -3_500),
            (50_000, 10_500, 10_600, 39_400),
        ] {
            let difference = difference(at(date), at(sent), at(received));
            assert_eq!(difference.as_millis(), expected, "{date} {sent} {received}");
        }
    }
}
