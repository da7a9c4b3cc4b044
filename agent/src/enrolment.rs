//! How the agent gets its certificate: once with a join token, then anew before it ends.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::{SignedDuration, Timestamp};
use krypton_common::bundle::{BundleError, JoinBundle};
use krypton_common::error_chain::chain;
use krypton_common::tls::{self, TlsError};
use krypton_proto::v1::{EnrollRequest, RenewRequest};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::clock;
use crate::dial::{Connection, DialError, Dialer};
use crate::identity::{
    CertificateError, Enrolled, Identity, IdentityError, Kept, Membership, Store, new_key,
};
use crate::join::token_name;
use crate::plan::backoff;
use crate::session::Link;

/// The hub gives itself 15 s.
const CALL: Duration = Duration::from_secs(20);
const RENEWAL_RETRY_MAX: Duration = Duration::from_secs(600);
/// The longest sleep before the clock is looked at again: it may have been set, or the machine asleep.
const LOOK_EVERY: Duration = Duration::from_secs(600);

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum EnrolError {
    #[error("the hub could not be asked for a certificate")]
    Dial(#[source] DialError),
    #[error("the hub at {address} gives cluster {cluster} no certificate: {words}")]
    Refused {
        address: String,
        cluster: String,
        words: String,
    },
    #[error("asking the hub at {address} for a certificate failed ({code:?}): {words}")]
    Call {
        address: String,
        code: Code,
        words: String,
    },
    #[error("the hub at {address} gave no certificate within {} s", CALL.as_secs())]
    Deadline { address: String },
    #[error(
        "the certificate that the hub at {address} gave cannot be used; run 'kubectl krypton join' again, or upgrade the hub"
    )]
    Certificate {
        address: String,
        #[source]
        source: CertificateError,
    },
    #[error("the join bundle cannot be used")]
    Bundle(#[source] BundleError),
    #[error("TLS with the hub cannot be set up")]
    Tls(#[source] TlsError),
    #[error("a certificate request could not be made")]
    Request(#[source] rcgen::Error),
    #[error("the certificate could not be kept")]
    Keep(#[source] IdentityError),
    #[error("there is no session with the hub to ask for a new certificate")]
    NoSession,
    #[error(
        "the identity of this agent is no longer in its Secret; it works until the process ends, then run 'kubectl krypton join' again"
    )]
    Gone,
}

impl EnrolError {
    fn of(connection: &Connection, cluster: &str, status: &Status) -> Self {
        if let Some(refused) = connection.refused() {
            return Self::Dial(refused);
        }
        let address = connection.address().to_owned();
        let words = status.message().chars().take(500).collect();
        match status.code() {
            Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::Unauthenticated
            | Code::NotFound
            | Code::Unimplemented => Self::Refused {
                address,
                cluster: cluster.to_owned(),
                words,
            },
            code => Self::Call {
                address,
                code,
                words,
            },
        }
    }

    /// Whether it may go by itself.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Dial(error) => error.may_pass(),
            Self::Keep(error) => error.may_pass(),
            Self::Call { .. } | Self::Deadline { .. } | Self::NoSession | Self::Gone => true,
            Self::Refused { .. }
            | Self::Certificate { .. }
            | Self::Bundle(_)
            | Self::Tls(_)
            | Self::Request(_) => false,
        }
    }
}

/// Gets a certificate for `key` with the bundle's token. The hub is looked for at `addresses`: the
/// bundle's, or others.
pub async fn enrol(
    bundle: &JoinBundle,
    addresses: Vec<String>,
    key: &KeyPair,
    cluster_uid: &str,
) -> Result<Enrolled, EnrolError> {
    let roots = bundle.roots().map_err(EnrolError::Bundle)?;
    let config = tls::client_config(&roots, None).map_err(EnrolError::Tls)?;
    let tls = Arc::new(ArcSwap::from_pointee(config));
    let dialer = Dialer::new(addresses, tls);
    let request = EnrollRequest {
        token: bundle.token.clone(),
        certificate_request: request(key)?.into(),
        cluster_uid: cluster_uid.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let connection = dialer.connect().await.map_err(EnrolError::Dial)?;
    let mut client = connection.enrollment();
    let answer = tokio::time::timeout(CALL, client.enroll(request)).await;
    let answer = answered(&connection, &bundle.cluster, answer)?;
    let membership = Membership {
        cluster: bundle.cluster.clone(),
        addresses: bundle.addresses.clone(),
        token_name: token_name(bundle).to_owned(),
    };
    checked(
        &connection,
        key,
        membership,
        ders(answer.certificates),
        ders(answer.roots),
    )
}

/// When a certificate is to be renewed: at `part` (0 to 1) between 70 and 80 % of its life, so that
/// many agents that joined together do not renew together.
pub fn renewal_time(not_before: Timestamp, not_after: Timestamp, part: f64) -> Timestamp {
    let life = not_after.duration_since(not_before);
    let share = 0.7 + 0.1 * part.clamp(0.0, 1.0);
    let lived = SignedDuration::from_secs((life.as_secs_f64() * share).round() as i64);
    not_before.checked_add(lived).unwrap_or(not_after)
}

/// Renews the certificate when its time comes, until `stop`. The session that lives goes on; the next
/// connection uses the new one. The newest is in `expiry`.
pub async fn keep_renewed(
    store: Store,
    mut kept: Kept,
    dialer: Arc<Dialer>,
    mut link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    stop: CancellationToken,
) {
    let mut attempts = 0;
    let mut part: f64 = rand::random();
    loop {
        let Some(enrolled) = kept.identity.enrolled.as_ref() else {
            return;
        };
        let due = renewal_time(enrolled.not_before, enrolled.not_after, part);
        let left = due.duration_since(clock::wall());
        let pause = match Duration::try_from(left) {
            Ok(left) if !left.is_zero() => left.min(LOOK_EVERY),
            _ if attempts == 0 => Duration::ZERO,
            _ => backoff(attempts, RENEWAL_RETRY_MAX, rand::random()),
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        if clock::wall() < due {
            continue;
        }
        let renewed = tokio::select! {
            () = stop.cancelled() => return,
            renewed = renew(&store, &kept, &mut link) => renewed,
        };
        let next =
            renewed.and_then(|next| adopt(&next, &dialer).map(|not_after| (next, not_after)));
        match next {
            Ok((next, not_after)) => {
                tracing::info!(%not_after, "the certificate was renewed");
                expiry.send_replace(not_after);
                kept = next;
                attempts = 0;
                part = rand::random();
            }
            Err(error) => {
                attempts += 1;
                let not_after = enrolled.not_after;
                tracing::warn!(%not_after, error = %chain(&error), "the certificate was not renewed; it is tried again");
            }
        }
    }
}

/// From here on connections are made with it.
fn adopt(kept: &Kept, dialer: &Dialer) -> Result<Timestamp, EnrolError> {
    let Some(enrolled) = &kept.identity.enrolled else {
        return Err(EnrolError::Gone);
    };
    let config = enrolled
        .client_config(&kept.identity.key)
        .map_err(EnrolError::Tls)?;
    dialer.renew(config);
    Ok(enrolled.not_after)
}

/// A new key and a new certificate, kept; or those that another replica has got meanwhile.
pub async fn renew(
    store: &Store,
    ours: &Kept,
    link: &mut watch::Receiver<Link>,
) -> Result<Kept, EnrolError> {
    let stored = store.read().await.map_err(EnrolError::Keep)?;
    let expires = |kept: &Kept| kept.identity.enrolled.as_ref().map(|own| own.not_after);
    let base = match stored {
        Some(stored) if expires(&stored) > expires(ours) => return Ok(stored),
        Some(stored) => stored,
        None => return Err(EnrolError::Gone),
    };
    let Some(enrolled) = &base.identity.enrolled else {
        return Err(EnrolError::Gone);
    };
    let membership = enrolled.membership();
    // The session says by itself why there is none.
    drop(tokio::time::timeout(LOOK_EVERY, link.wait_for(Link::is_up)).await);
    let connection = link.borrow_and_update().connection().cloned();
    let connection = connection.ok_or(EnrolError::NoSession)?;
    let key = new_key().map_err(EnrolError::Keep)?;
    let message = RenewRequest {
        certificate_request: request(&key)?.into(),
    };
    let mut client = connection.fleet();
    let answer = tokio::time::timeout(CALL, client.renew(message)).await;
    let answer = answered(&connection, &membership.cluster, answer)?;
    let enrolled = checked(
        &connection,
        &key,
        membership,
        ders(answer.certificates),
        ders(answer.roots),
    )?;
    let identity = Identity {
        key,
        enrolled: Some(enrolled),
    };
    store.keep(base, identity).await.map_err(EnrolError::Keep)
}

fn request(key: &KeyPair) -> Result<Vec<u8>, EnrolError> {
    // Of all that it could say only the key is used.
    let request = CertificateParams::default()
        .serialize_request(key)
        .map_err(EnrolError::Request)?;
    Ok(request.der().to_vec())
}

fn answered<T>(
    connection: &Connection,
    cluster: &str,
    answer: Result<Result<tonic::Response<T>, Status>, tokio::time::error::Elapsed>,
) -> Result<T, EnrolError> {
    match answer {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(EnrolError::of(connection, cluster, &status)),
        Err(_) => Err(EnrolError::Deadline {
            address: connection.address().to_owned(),
        }),
    }
}

fn checked(
    connection: &Connection,
    key: &KeyPair,
    membership: Membership,
    certificates: Vec<CertificateDer<'static>>,
    roots: Vec<CertificateDer<'static>>,
) -> Result<Enrolled, EnrolError> {
    let enrolled = Enrolled::check(key, membership, certificates, roots).map_err(|source| {
        EnrolError::Certificate {
            address: connection.address().to_owned(),
            source,
        }
    })?;
    // What TLS would not take must not be kept.
    enrolled.client_config(key).map_err(EnrolError::Tls)?;
    Ok(enrolled)
}

fn ders(parts: Vec<impl AsRef<[u8]>>) -> Vec<CertificateDer<'static>> {
    parts
        .iter()
        .map(|der| CertificateDer::from(der.as_ref().to_vec()))
        .collect()
}

#[cfg(test)]
mod tests {
    use krypton_proto::v1::{EnrollResponse, RenewResponse};

    use super::*;
    use crate::fake_hub::{Answers, FakeAuthority, FakeHub, Valid};
    use crate::identity::tests::store_with;

    fn bundle(authority: &FakeAuthority, hub: &FakeHub) -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses: hub.addresses(),
            certificate_authority: authority.root_pem.clone(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    async fn hub_that_signs(authority: &Arc<FakeAuthority>, cluster: &'static str) -> FakeHub {
        let signing = Arc::clone(authority);
        let answers = Answers {
            enrol: Box::new(move |request| {
                assert_eq!(request.cluster_uid, "uid-1");
                let own = signing.sign(&request.certificate_request, cluster);
                let roots = signing.roots();
                Ok(EnrollResponse {
                    certificates: vec![own.into()],
                    roots: roots.iter().map(|root| root.to_vec().into()).collect(),
                })
            }),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        FakeHub::start_as(authority, own, answers, "127.0.0.1:0").await
    }

    async fn enrolled(bundle: &JoinBundle, key: &KeyPair) -> Result<Enrolled, EnrolError> {
        enrol(bundle, bundle.addresses.clone(), key, "uid-1").await
    }

    #[tokio::test]
    async fn a_token_gives_a_certificate_with_which_the_hub_can_be_talked_to() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = hub_that_signs(&authority, "edge-1").await;
        let key = new_key().unwrap();
        let bundle = bundle(&authority, &hub);
        let enrolled = enrolled(&bundle, &key).await.unwrap();
        assert_eq!(enrolled.cluster, "edge-1");
        assert_eq!(enrolled.token_name, "a".repeat(16));
        let config = enrolled.client_config(&key).unwrap();
        let tls = Arc::new(ArcSwap::from_pointee(config));
        let connection = Dialer::new(hub.addresses(), tls).connect().await.unwrap();
        let answer = connection.fleet().renew(RenewRequest::default()).await;
        // The fake has no answer to that, but it has heard it.
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented);
    }

    #[tokio::test]
    async fn a_certificate_of_another_name_is_not_taken() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = hub_that_signs(&authority, "edge-2").await;
        let error = enrolled(&bundle(&authority, &hub), &new_key().unwrap())
            .await
            .unwrap_err();
        let said = chain(&error);
        assert!(said.contains("edge-2") && said.contains("edge-1"), "{said}");
        assert!(!error.may_pass());
    }

    #[tokio::test]
    async fn a_refusal_ends_it_with_the_hubs_words() {
        let authority = FakeAuthority::new();
        let words = "the join token of cluster edge-1 was used already by another key";
        let answers = Answers {
            enrol: Box::new(move |_| Err(Status::failed_precondition(words))),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        let hub = FakeHub::start_as(&authority, own, answers, "127.0.0.1:0").await;
        let error = enrolled(&bundle(&authority, &hub), &new_key().unwrap())
            .await
            .unwrap_err();
        assert!(chain(&error).contains(words), "{error:?}");
        assert!(!error.may_pass());
    }

    #[tokio::test]
    async fn a_hub_of_another_ca_ends_it_and_a_busy_one_may_be_asked_again() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = hub_that_signs(&authority, "edge-1").await;
        let other = bundle(&FakeAuthority::new(), &hub);
        let key = new_key().unwrap();
        let error = enrolled(&other, &key).await.unwrap_err();
        assert!(chain(&error).contains("another CA"), "{error:?}");

        let answers = Answers {
            enrol: Box::new(|_| Err(Status::unavailable("busy"))),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        let busy = FakeHub::start_as(&authority, own, answers, "127.0.0.1:0").await;
        let error = enrolled(&bundle(&authority, &busy), &key)
            .await
            .unwrap_err();
        assert!(error.may_pass(), "{error:?}");
    }

    fn identity(authority: &FakeAuthority) -> Identity {
        let key = new_key().unwrap();
        let enrolled = crate::identity::tests::enrolled(authority, &key, "edge-1");
        Identity {
            key,
            enrolled: Some(enrolled),
        }
    }

    #[tokio::test]
    async fn a_renewal_brings_a_new_key_which_is_kept_and_used_from_then_on() {
        let authority = Arc::new(FakeAuthority::new());
        let signing = Arc::clone(&authority);
        let answers = Answers {
            renew: Box::new(move |request| {
                let own = signing.sign(&request.certificate_request, "edge-1");
                let roots = signing.roots();
                Ok(RenewResponse {
                    certificates: vec![own.into()],
                    roots: roots.iter().map(|root| root.to_vec().into()).collect(),
                })
            }),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        let hub = FakeHub::start_as(&authority, own, answers, "127.0.0.1:0").await;
        let before = identity(&authority);
        let store = store_with(&before).await;
        let ours = store.read().await.unwrap().unwrap();
        let config = before.enrolled.as_ref().unwrap().client_config(&before.key);
        let tls = Arc::new(ArcSwap::from_pointee(config.unwrap()));
        let dialer = Dialer::new(hub.addresses(), tls);
        let connection = dialer.connect().await.unwrap();
        let (_link, mut link) = watch::channel(Link::Up(connection));

        let renewed = renew(&store, &ours, &mut link).await.unwrap();
        let key = renewed.identity.key.serialize_der();
        assert_ne!(key, before.key.serialize_der());
        let stored = store.read().await.unwrap().unwrap();
        assert_eq!(stored.identity.key.serialize_der(), key);
        assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);
        adopt(&renewed, &dialer).unwrap();
        assert!(dialer.connect().await.is_ok());
    }

    #[tokio::test]
    async fn what_another_replica_has_renewed_is_used_without_asking_the_hub() {
        let authority = FakeAuthority::new();
        let theirs = identity(&authority);
        let store = store_with(&theirs).await;
        let mut ours = store.read().await.unwrap().unwrap();
        let mut older = identity(&authority);
        if let Some(enrolled) = &mut older.enrolled {
            enrolled.not_after = enrolled.not_before;
        }
        ours.identity = older;
        let (_link, mut link) = watch::channel(Link::default());
        let adopted = renew(&store, &ours, &mut link).await.unwrap();
        assert_eq!(adopted.identity.enrolled, theirs.enrolled);
    }

    #[test]
    fn renewal_is_between_seventy_and_eighty_hundredths_of_the_life() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(renewal_time(at(1000), at(2000), 0.0), at(1700));
        assert_eq!(renewal_time(at(1000), at(2000), 1.0), at(1800));
        assert_eq!(renewal_time(at(1000), at(1000), 0.5), at(1000));
    }
}
