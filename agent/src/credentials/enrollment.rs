//! Enrolls the agent with a join token and renews its certificate before it expires.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::{SignedDuration, Timestamp};
use krypton_proto::v1::{EnrollRequest, RenewRequest};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::effect;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::retry::backoff;
use krypton_runtime::tls::{self, TlsError};
use krypton_types::error_chain::chain;
use krypton_types::join_bundle::{BundleError, JoinBundle};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::credentials::join::token_name;
use crate::credentials::store::{
    CertificateError, Enrolled, Identity, IdentityError, Kept, Membership, Store, new_key,
};
use crate::credentials::trusted_roots::{self, Told, TrustError};
use crate::session::Link;
use crate::session::connect::{Connection, DialError, Dialer};

/// The hub's own limit is 15 s.
const CALL: Duration = Duration::from_secs(20);
const RENEWAL_RETRY_MAX: Duration = Duration::from_secs(600);
/// Longest sleep between two clock readings, because the clock can be set and the machine can be suspended.
const LOOK_EVERY: Duration = Duration::from_secs(600);
/// Without a session, how often the agent reads the Secret for a newer identity from another replica.
const READ_AGAIN_EVERY: Duration = Duration::from_secs(60);
const ROOTS_RETRY_MAX: Duration = Duration::from_secs(60);

/// Reason why the agent got no certificate.
#[derive(Debug, Error)]
pub enum EnrollError {
    #[error("the hub could not be asked for a certificate")]
    Dial(#[source] DialError),
    #[error("the hub at {address} gives cluster {cluster} no certificate: {message}")]
    Refused {
        address: String,
        cluster: String,
        message: String,
    },
    #[error("asking the hub at {address} for a certificate failed ({code:?}): {message}")]
    Call {
        address: String,
        code: Code,
        message: String,
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
    #[error("the roots that the hub names are not taken; those known are kept")]
    Roots(#[source] TrustError),
    #[error("another replica has written the identity at the same time")]
    Overtaken,
    #[error(
        "the identity of this agent is no longer in its Secret; it works until the process ends, then run 'kubectl krypton join' again"
    )]
    Gone,
}

impl EnrollError {
    fn of(connection: &Connection, cluster: &str, status: &Status) -> Self {
        if let Some(refused) = connection.refused() {
            return Self::Dial(refused);
        }
        let address = connection.address().to_owned();
        let message = status.message().chars().take(500).collect();
        match status.code() {
            Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::Unauthenticated
            | Code::NotFound
            | Code::Unimplemented => Self::Refused {
                address,
                cluster: cluster.to_owned(),
                message,
            },
            code => Self::Call {
                address,
                code,
                message,
            },
        }
    }

    /// Returns whether a retry can succeed without a change by the user.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Dial(error) => error.may_pass(),
            Self::Keep(error) => error.may_pass(),
            Self::Call { .. }
            | Self::Deadline { .. }
            | Self::NoSession
            | Self::Overtaken
            | Self::Gone => true,
            Self::Refused { .. }
            | Self::Certificate { .. }
            | Self::Bundle(_)
            | Self::Roots(_)
            | Self::Tls(_)
            | Self::Request(_) => false,
        }
    }
}

/// Requests a certificate for `key` with the bundle's token. Connects to the hub at `addresses`, which may differ from
/// the bundle's.
pub async fn enroll(
    bundle: &JoinBundle,
    addresses: Vec<String>,
    key: &KeyPair,
    cluster_uid: &str,
) -> Result<Enrolled, EnrollError> {
    let roots = bundle.roots().map_err(EnrollError::Bundle)?;
    let config = tls::client_config(&roots, None).map_err(EnrollError::Tls)?;
    let tls = Arc::new(ArcSwap::from_pointee(config));
    let dialer = Dialer::new(addresses, tls);
    let request = EnrollRequest {
        token: bundle.token.clone(),
        certificate_request: request(key)?.into(),
        cluster_uid: cluster_uid.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut left = dialer.ways();
    let (connection, answer) = loop {
        let connection = dialer.connect().await.map_err(EnrollError::Dial)?;
        let mut client = connection.enrollment();
        let asked = effect!("enrollment.enroll", client.enroll(request.clone()));
        let answer = tokio::time::timeout(CALL, asked).await;
        left = left.saturating_sub(1);
        match answered(&connection, &bundle.cluster, answer) {
            Ok(answer) => break (connection, answer),
            // A hub that is not the leader returns this code. A retry with the same key does not use the token twice.
            Err(EnrollError::Call {
                code: Code::Unavailable,
                ..
            }) if left > 0 => dialer.pass_on(connection.address()),
            Err(error) => return Err(error),
        }
    };
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

/// Returns the renewal time of a certificate. It is at `part` (0 to 1) between 70 and 80 % of the lifetime, to spread
/// the renewals of agents that joined together.
pub fn renewal_time(not_before: Timestamp, not_after: Timestamp, part: f64) -> Timestamp {
    let life = not_after.duration_since(not_before);
    let share = 0.7 + 0.1 * part.clamp(0.0, 1.0);
    let lived = SignedDuration::from_secs((life.as_secs_f64() * share).round() as i64);
    not_before.checked_add(lived).unwrap_or(not_after)
}

/// Renews the certificate when it is due or the hub requests it, and stores the roots that the hub announces. Runs
/// until `stop`. The current session stays open, and the next connection uses the newest certificate and roots.
/// Publishes the expiry time in `expiry`.
pub async fn keep_renewed(
    store: Store,
    kept: Kept,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    stop: CancellationToken,
) {
    let mut told = dialer.trust().told();
    // The hub may have announced roots before this subscription.
    told.mark_changed();
    let keeper = Keeper {
        told,
        store,
        kept,
        dialer,
        link,
        expiry,
        times: Times::default(),
        part: rand::random(),
        roots: None,
        failures: 0,
    };
    stop.run_until_cancelled(keeper.run()).await;
}

/// Earliest times of the next attempts.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// When to store the roots that the hub announced.
    roots: Option<BootTime>,
    /// When to renew on request of the hub.
    asked: Option<BootTime>,
    /// No renewal before this time, after a failure.
    renewal: BootTime,
    /// No read of the stored identity before this time.
    look: BootTime,
}

/// Next step of the [`Keeper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chore {
    KeepRoots,
    Renew,
    /// Read the stored identity: another replica may have renewed it.
    ReadAgain,
    Rest(Duration),
}

impl Times {
    /// Returns the next step. `left` is the time until the certificate is due for renewal by age. Without a session
    /// (`up` is false), the agent can only read an identity that another replica stored.
    fn chore(&self, left: Duration, up: bool, now: BootTime) -> Chore {
        let until = |at: BootTime| at.since(now);
        if self.roots.is_some_and(|at| at <= now) {
            return Chore::KeepRoots;
        }
        let asked = self.asked.map_or(Duration::MAX, until);
        let renewal = left.min(asked).max(until(self.renewal));
        if up && renewal.is_zero() {
            return Chore::Renew;
        }
        if !up && self.look <= now {
            return Chore::ReadAgain;
        }
        let next = match up {
            true => renewal,
            false => until(self.look),
        };
        Chore::Rest(
            next.min(self.roots.map_or(LOOK_EVERY, until))
                .min(LOOK_EVERY),
        )
    }
}

/// Maintains the identity of one agent.
struct Keeper {
    store: Store,
    kept: Kept,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    told: watch::Receiver<Option<Told>>,
    times: Times,
    /// Random position of the next renewal in its window, from 0 to 1.
    part: f64,
    /// Roots that the hub announced and the agent has not stored yet.
    roots: Option<Vec<CertificateDer<'static>>>,
    failures: u32,
}

impl Keeper {
    async fn run(mut self) {
        while let Some(enrolled) = &self.kept.identity.enrolled {
            let due = renewal_time(enrolled.not_before, enrolled.not_after, self.part);
            let left = due.duration_since(clock::wall()).try_into();
            let left = left.unwrap_or(Duration::ZERO);
            let up = self.link.see().is_up();
            match self.times.chore(left, up, BootTime::now()) {
                // Boxed because these futures are large and rarely run; they would enlarge every idle agent.
                Chore::KeepRoots => Box::pin(self.keep_roots()).await,
                Chore::Renew => Box::pin(self.renew()).await,
                Chore::ReadAgain => Box::pin(self.read_again()).await,
                Chore::Rest(pause) => tokio::select! {
                    Ok(()) = self.told.changed() => self.hear(),
                    Ok(()) = self.link.changed() => {}
                    () = tokio::time::sleep(pause) => {}
                },
            }
        }
    }

    /// Takes over the latest announcement of the hub.
    fn hear(&mut self) {
        let Some(told) = self.told.see() else {
            return;
        };
        let now = BootTime::now();
        self.times.asked = told.renew_within.map(|within| {
            let at = BootTime(now.0 + within.mul_f64(rand::random()));
            // A repeated request must not postpone the renewal.
            self.times.asked.map_or(at, |before| before.min(at))
        });
        self.times.roots = Some(now);
        self.roots = Some(told.roots);
        self.failures = 0;
    }

    async fn keep_roots(&mut self) {
        self.times.roots = None;
        let Some(roots) = self.roots.clone() else {
            return;
        };
        let kept = keep_roots(&self.store, &self.kept, roots).await;
        match kept.and_then(|next| {
            self.adopt(&next)?;
            Ok(next)
        }) {
            Ok(next) => {
                self.kept = next;
                self.roots = None;
                self.failures = 0;
            }
            // Retry also errors that the user must fix, such as a missing permission: the hub announces its roots only
            // once.
            Err(error) if !matches!(error, EnrollError::Roots(_) | EnrollError::Tls(_)) => {
                self.failures += 1;
                let pause = backoff(self.failures, ROOTS_RETRY_MAX, rand::random());
                self.times.roots = Some(BootTime(BootTime::now().0 + pause));
                tracing::warn!(error = %chain(&error), "the roots that the hub names were not kept; it is tried again");
            }
            Err(error) => {
                self.roots = None;
                tracing::error!(error = %chain(&error), "the hub's CA is not followed");
            }
        }
    }

    async fn renew(&mut self) {
        let renewed = renew(&self.store, &self.kept, &mut self.link).await;
        match renewed.and_then(|next| {
            let not_after = self.adopt(&next)?;
            Ok((next, not_after))
        }) {
            Ok((next, not_after)) => {
                tracing::info!(%not_after, "the certificate was renewed");
                self.kept = next;
                self.times.asked = None;
                self.failures = 0;
                self.part = rand::random();
            }
            Err(error) => {
                self.failures += 1;
                let pause = backoff(self.failures, RENEWAL_RETRY_MAX, rand::random());
                self.times.renewal = BootTime(BootTime::now().0 + pause);
                let not_after = self.expiry.get();
                tracing::warn!(%not_after, error = %chain(&error), "the certificate was not renewed; it is tried again");
            }
        }
    }

    async fn read_again(&mut self) {
        let pause = READ_AGAIN_EVERY.mul_f64(0.5 + rand::random::<f64>() / 2.0);
        self.times.look = BootTime(BootTime::now().0 + pause);
        let stored = match self.store.read().await {
            Ok(Some(stored)) => stored,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(error = %chain(&error), "the identity was not read again");
                return;
            }
        };
        let newer = expires(&stored) >= expires(&self.kept);
        if !newer || stored.identity.enrolled == self.kept.identity.enrolled {
            return;
        }
        match self.adopt(&stored) {
            Ok(not_after) => {
                tracing::info!(%not_after, "another replica has kept a newer identity; it is used");
                self.kept = stored;
            }
            Err(error) => {
                tracing::debug!(error = %chain(&error), "what another replica has kept cannot be used");
            }
        }
    }

    /// Uses `next` for new connections. If the certificate is new, the session reconnects immediately.
    fn adopt(&self, next: &Kept) -> Result<Timestamp, EnrollError> {
        let Some(enrolled) = &next.identity.enrolled else {
            return Err(EnrollError::Gone);
        };
        let config = enrolled
            .client_config(&next.identity.key)
            .map_err(EnrollError::Tls)?;
        let before = self.kept.identity.enrolled.as_ref();
        match before.is_some_and(|before| before.certificates == enrolled.certificates) {
            true => self.dialer.replace(config),
            false => self.dialer.renew(config),
        }
        self.dialer.trust().keep(&enrolled.roots);
        self.expiry.send_replace(enrolled.not_after);
        Ok(enrolled.not_after)
    }
}

fn expires(kept: &Kept) -> Option<Timestamp> {
    kept.identity.enrolled.as_ref().map(|own| own.not_after)
}

/// Stores the roots that the hub announced. Keeps a newer certificate from another replica.
async fn keep_roots(
    store: &Store,
    ours: &Kept,
    roots: Vec<CertificateDer<'static>>,
) -> Result<Kept, EnrollError> {
    let trusted = ours.identity.enrolled.as_ref().ok_or(EnrollError::Gone)?;
    trusted_roots::check(&trusted.roots, &roots).map_err(EnrollError::Roots)?;
    let stored = store.read().await.map_err(EnrollError::Keep)?;
    let stored = stored.ok_or(EnrollError::Gone)?;
    let mut identity = match expires(&stored) >= expires(ours) {
        true => stored.identity.clone(),
        false => ours.identity.clone(),
    };
    let enrolled = identity.enrolled.as_mut().ok_or(EnrollError::Gone)?;
    enrolled.roots = roots;
    // Never store an identity that TLS rejects.
    enrolled
        .client_config(&identity.key)
        .map_err(EnrollError::Tls)?;
    if identity.enrolled == stored.identity.enrolled {
        return Ok(stored);
    }
    let wanted = identity.enrolled.clone();
    let kept = store.keep(stored, identity).await;
    let kept = kept.map_err(EnrollError::Keep)?;
    match kept.identity.enrolled == wanted {
        true => Ok(kept),
        false => Err(EnrollError::Overtaken),
    }
}

/// Stores and returns a new key with a new certificate, or returns a newer identity from another replica.
pub async fn renew(
    store: &Store,
    ours: &Kept,
    link: &mut watch::Receiver<Link>,
) -> Result<Kept, EnrollError> {
    let stored = store.read().await.map_err(EnrollError::Keep)?;
    let base = match stored {
        Some(stored) if expires(&stored) > expires(ours) => return Ok(stored),
        Some(stored) => stored,
        None => return Err(EnrollError::Gone),
    };
    let Some(enrolled) = &base.identity.enrolled else {
        return Err(EnrollError::Gone);
    };
    let membership = enrolled.membership();
    let trusted = ours.identity.enrolled.as_ref().unwrap_or(enrolled);
    // The session logs the reason if it is down.
    drop(tokio::time::timeout(LOOK_EVERY, link.wait_for(Link::is_up)).await);
    let connection = link.see().connection().cloned();
    let connection = connection.ok_or(EnrollError::NoSession)?;
    let key = new_key().map_err(EnrollError::Keep)?;
    let message = RenewRequest {
        certificate_request: request(&key)?.into(),
    };
    let mut client = connection.fleet();
    let asked = effect!("enrollment.renew", client.renew(message));
    let answer = tokio::time::timeout(CALL, asked).await;
    let answer = answered(&connection, &membership.cluster, answer)?;
    let roots = ders(answer.roots);
    trusted_roots::check(&trusted.roots, &roots).map_err(EnrollError::Roots)?;
    let enrolled = checked(
        &connection,
        &key,
        membership,
        ders(answer.certificates),
        roots,
    )?;
    let identity = Identity {
        key,
        enrolled: Some(enrolled),
    };
    let wanted = identity.enrolled.clone();
    let kept = store.keep(base, identity).await;
    let kept = kept.map_err(EnrollError::Keep)?;
    // The Secret now holds another replica's write. It is either a renewal, or only new roots with the old certificate.
    match kept.identity.enrolled == wanted || expires(&kept) > expires(ours) {
        true => Ok(kept),
        false => Err(EnrollError::Overtaken),
    }
}

fn request(key: &KeyPair) -> Result<Vec<u8>, EnrollError> {
    // The hub uses only the key of the request.
    let request = CertificateParams::default()
        .serialize_request(key)
        .map_err(EnrollError::Request)?;
    Ok(request.der().to_vec())
}

fn answered<T>(
    connection: &Connection,
    cluster: &str,
    answer: Result<Result<tonic::Response<T>, Status>, tokio::time::error::Elapsed>,
) -> Result<T, EnrollError> {
    match answer {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(EnrollError::of(connection, cluster, &status)),
        Err(_) => Err(EnrollError::Deadline {
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
) -> Result<Enrolled, EnrollError> {
    let enrolled = Enrolled::check(key, membership, certificates, roots).map_err(|source| {
        EnrollError::Certificate {
            address: connection.address().to_owned(),
            source,
        }
    })?;
    // Never store an identity that TLS rejects.
    enrolled.client_config(key).map_err(EnrollError::Tls)?;
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
    use futures::FutureExt;
    use krypton_proto::v1::{EnrollResponse, RenewResponse};
    use krypton_types::root_digest::RootDigest;

    use super::*;
    use crate::credentials::store::tests::{store_overtaken_by, store_with};
    use crate::fake_hub::{Answers, FakeAuthority, FakeHub, Valid};

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
            enroll: Box::new(move |request| {
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

    async fn enrolled(bundle: &JoinBundle, key: &KeyPair) -> Result<Enrolled, EnrollError> {
        enroll(bundle, bundle.addresses.clone(), key, "uid-1").await
    }

    #[tokio::test]
    async fn token_yields_certificate_accepted_by_hub() {
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
        // The fake hub received the call; it implements no answer to it.
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
        let message = "the join token of cluster edge-1 was used already by another key";
        let answers = Answers {
            enroll: Box::new(move |_| Err(Status::failed_precondition(message))),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        let hub = FakeHub::start_as(&authority, own, answers, "127.0.0.1:0").await;
        let error = enrolled(&bundle(&authority, &hub), &new_key().unwrap())
            .await
            .unwrap_err();
        assert!(chain(&error).contains(message), "{error:?}");
        assert!(!error.may_pass());
    }

    #[tokio::test]
    async fn foreign_ca_is_rejected_busy_hub_is_retried() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = hub_that_signs(&authority, "edge-1").await;
        let other = bundle(&FakeAuthority::new(), &hub);
        let key = new_key().unwrap();
        let error = enrolled(&other, &key).await.unwrap_err();
        assert!(chain(&error).contains("another CA"), "{error:?}");

        let answers = Answers {
            enroll: Box::new(|_| Err(Status::unavailable("busy"))),
            ..Answers::default()
        };
        let own = authority.hub(Valid::Now);
        let busy = FakeHub::start_as(&authority, own, answers, "127.0.0.1:0").await;
        let error = enrolled(&bundle(&authority, &busy), &key)
            .await
            .unwrap_err();
        assert!(error.may_pass(), "{error:?}");

        // The agent tries the next hub in the same attempt.
        let mut both = bundle(&authority, &busy);
        both.addresses.extend(hub.addresses());
        let enrolled = enrolled(&both, &key).await.unwrap();
        assert_eq!(enrolled.addresses, both.addresses);
    }

    fn identity(authority: &FakeAuthority) -> Identity {
        identity_until(authority, Valid::Now)
    }

    fn identity_until(authority: &FakeAuthority, valid: Valid) -> Identity {
        let key = new_key().unwrap();
        let enrolled =
            crate::credentials::store::tests::enrolled_until(authority, &key, "edge-1", valid);
        Identity {
            key,
            enrolled: Some(enrolled),
        }
    }

    /// Starts a hub that signs every renewal request.
    async fn renewing(authority: &Arc<FakeAuthority>) -> FakeHub {
        let signing = Arc::clone(authority);
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
        FakeHub::start_as(authority, own, answers, "127.0.0.1:0").await
    }

    #[tokio::test]
    async fn renewal_stores_and_uses_new_key() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = renewing(&authority).await;
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
        let config = renewed.identity.enrolled.unwrap();
        dialer.renew(config.client_config(&renewed.identity.key).unwrap());
        assert!(dialer.connect().await.is_ok());
    }

    #[tokio::test]
    async fn certificate_renewed_by_other_replica_is_adopted() {
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

    #[tokio::test]
    async fn overtaken_renewal_succeeds_only_with_newer_certificate() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = renewing(&authority).await;
        let dialer = authority.dialer(hub.addresses(), Valid::Now);
        let connection = dialer.connect().await.unwrap();
        let (_link, mut link) = watch::channel(Link::Up(connection));
        let before = identity_until(&authority, Valid::Past);

        // Another replica has stored new roots with the old certificate.
        let mut with_roots = before.clone();
        let enrolled = with_roots.enrolled.as_mut().unwrap();
        enrolled.roots.extend(FakeAuthority::new().roots());
        let store = store_overtaken_by(&before, &with_roots).await;
        let ours = store.read().await.unwrap().unwrap();
        let error = renew(&store, &ours, &mut link).await.unwrap_err();
        assert!(matches!(error, EnrollError::Overtaken), "{error:?}");
        let stored = store.read().await.unwrap().unwrap();
        assert_eq!(stored.identity.enrolled, with_roots.enrolled);
        // The next attempt has no conflict.
        let renewed = renew(&store, &ours, &mut link).await.unwrap();
        assert!(expires(&renewed) > expires(&ours));
        let stored = store.read().await.unwrap().unwrap();
        assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);

        // Another replica has renewed.
        let theirs = identity(&authority);
        let store = store_overtaken_by(&before, &theirs).await;
        let ours = store.read().await.unwrap().unwrap();
        let renewed = renew(&store, &ours, &mut link).await.unwrap();
        assert_eq!(renewed.identity.enrolled, theirs.enrolled);
    }

    /// A keeper of `identity`, with the other ends of its channels.
    struct Keeping {
        store: Store,
        dialer: Arc<Dialer>,
        link: watch::Sender<Link>,
        expiry: watch::Receiver<Timestamp>,
        _stop: tokio_util::sync::DropGuard,
    }

    async fn keeper(identity: &Identity, addresses: Vec<String>) -> Keeping {
        let store = store_with(identity).await;
        let kept = store.read().await.unwrap().unwrap();
        keeper_of(identity, kept, store, addresses)
    }

    fn keeper_of(identity: &Identity, kept: Kept, store: Store, addresses: Vec<String>) -> Keeping {
        let enrolled = identity.enrolled.as_ref().unwrap();
        let config = enrolled.client_config(&identity.key).unwrap();
        let dialer = Dialer::new(addresses, Arc::new(ArcSwap::from_pointee(config)));
        let dialer = Arc::new(dialer);
        let (link, link_rx) = watch::channel(Link::default());
        let (expiry_tx, expiry) = watch::channel(enrolled.not_after);
        let stop = CancellationToken::new();
        tokio::spawn(keep_renewed(
            store.clone(),
            kept,
            Arc::clone(&dialer),
            link_rx,
            expiry_tx,
            stop.clone(),
        ));
        Keeping {
            store,
            dialer,
            link,
            expiry,
            _stop: stop.drop_guard(),
        }
    }

    impl Keeping {
        async fn stored(&self) -> Enrolled {
            let stored = self.store.read().await.unwrap().unwrap();
            stored.identity.enrolled.unwrap()
        }

        /// Announces `roots` as the hub does, and waits until the agent confirms them.
        async fn is_told(&self, roots: &[CertificateDer<'static>], renew: Option<Duration>) {
            let wanted = RootDigest::of_all(roots);
            let mut kept = self.dialer.trust().kept();
            kept.mark_unchanged();
            self.dialer.trust().tell(Told {
                roots: roots.to_vec(),
                renew_within: renew,
            });
            kept.changed().await.unwrap();
            assert_eq!(kept.get(), Some(wanted));
        }
    }

    #[tokio::test]
    async fn announced_roots_are_stored_without_renewing_certificate() {
        let (old, new) = (FakeAuthority::new(), FakeAuthority::new());
        let before = identity(&old);
        let next = new.hub(Valid::Now);
        let hub = FakeHub::start_as(&old, next, Answers::default(), "127.0.0.1:0").await;
        let kept = keeper(&before, hub.addresses()).await;
        let other = kept.dialer.connect().await.unwrap_err();
        assert!(chain(&other).contains("another CA"), "{other:?}");

        let both = [old.roots(), new.roots()].concat();
        kept.is_told(&both, None).await;
        let enrolled = before.enrolled.unwrap();
        let expected = Enrolled {
            roots: both,
            ..enrolled
        };
        assert_eq!(kept.stored().await, expected);
        kept.dialer.connect().await.unwrap();
        // New roots alone must not replace the current stream.
        assert!(kept.dialer.renewed().now_or_never().is_none());

        // The old root is removed.
        kept.is_told(&new.roots(), None).await;
        assert_eq!(kept.stored().await.roots, new.roots());
    }

    #[tokio::test]
    async fn foreign_roots_change_nothing_on_member() {
        let old = FakeAuthority::new();
        let before = identity(&old);
        let kept = keeper(&before, vec!["127.0.0.1:1".to_owned()]).await;
        kept.dialer.trust().tell(Told {
            roots: FakeAuthority::new().roots(),
            renew_within: None,
        });
        // The agent processed the later announcement, so it rejected the earlier one.
        kept.is_told(&old.roots(), None).await;
        assert_eq!(Some(kept.stored().await), before.enrolled);
    }

    #[tokio::test]
    async fn certificate_is_renewed_early_on_hub_request() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = renewing(&authority).await;
        let before = identity(&authority);
        let kept = keeper(&before, hub.addresses()).await;
        // The hub disconnects before the renewal is due. The agent renews when it is connected again.
        kept.is_told(&authority.roots(), Some(Duration::ZERO)).await;
        let connection = kept.dialer.connect().await.unwrap();
        kept.link.send_replace(Link::Up(connection));
        kept.dialer.renewed().await;
        assert_ne!(Some(kept.stored().await), before.enrolled);
        assert_eq!(kept.expiry.get(), kept.stored().await.not_after);
    }

    #[tokio::test]
    async fn renewal_by_other_replica_is_found_without_hub() {
        let authority = FakeAuthority::new();
        let (before, theirs) = (identity(&authority), identity(&authority));
        let store = store_with(&before).await;
        let ours = store.read().await.unwrap().unwrap();
        store.keep(ours.clone(), theirs).await.unwrap();
        let kept = keeper_of(&before, ours, store, vec!["127.0.0.1:1".to_owned()]);
        kept.dialer.renewed().await;
        assert_ne!(Some(kept.stored().await), before.enrolled);
    }

    #[test]
    fn next_chore_follows_from_due_times() {
        let at = |second| BootTime(Duration::from_secs(second));
        let (now, never, long) = (at(1000), Times::default(), LOOK_EVERY * 2);
        let seconds = Duration::from_secs;
        let rest = |second| Chore::Rest(seconds(second));
        let roots = |second| Times {
            roots: Some(at(second)),
            ..never
        };
        let asked = |second| Times {
            asked: Some(at(second)),
            ..never
        };
        let failed = |second| Times {
            renewal: at(second),
            ..asked(second - 10)
        };
        let looked = Times {
            look: at(1030),
            ..never
        };
        for (times, left, up, expected) in [
            (never, long, true, Chore::Rest(LOOK_EVERY)),
            (never, seconds(5), true, rest(5)),
            (never, Duration::ZERO, true, Chore::Renew),
            // Renewal needs a session. The read is not repeated immediately.
            (never, Duration::ZERO, false, Chore::ReadAgain),
            (looked, Duration::ZERO, false, rest(30)),
            (failed(1007), Duration::ZERO, true, rest(7)),
            (failed(1000), long, true, Chore::Renew),
            (asked(1020), long, true, rest(20)),
            (asked(999), long, true, Chore::Renew),
            // Roots come first, because they verify the renewed certificate.
            (roots(1000), Duration::ZERO, true, Chore::KeepRoots),
            (roots(1003), long, true, rest(3)),
            (roots(1003), Duration::ZERO, true, Chore::Renew),
        ] {
            assert_eq!(
                times.chore(left, up, now),
                expected,
                "{times:?} {left:?} {up}"
            );
        }
    }

    #[test]
    fn renewal_is_due_at_70_to_80_percent() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(renewal_time(at(1000), at(2000), 0.0), at(1700));
        assert_eq!(renewal_time(at(1000), at(2000), 1.0), at(1800));
        assert_eq!(renewal_time(at(1000), at(1000), 0.5), at(1000));
    }
}
