//! The hub's certificate authority: Secret `krypton-hub-ca` on the home cluster, and the certificates that
//! it signs.

mod certificate;
pub(crate) mod csr;
mod current;
mod phase;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::access::pem;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::tls::Credential;
use krypton_runtime::{chance, clock};
use krypton_types::ca_rotation::RotationPhase;
use krypton_types::names::CA_SECRET;
use krypton_types::root_digest::RootDigest;
use krypton_types::spiffe::SpiffeId;
use krypton_types::validity::{BACK_DATED, Validity};
use kube::Client;
use kube::api::{Api, PostParams};
use rcgen::string::PrintableString;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
    SerialNumber,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use thiserror::Error;
use x509_parser::prelude::{FromDer as _, X509Certificate};

pub use certificate::{AgentCertificate, CertificateError, read_agent_certificate};
pub use csr::{REQUEST_MAX_BYTES, RequestError, public_key_digest};
pub use current::CurrentAuthority;
pub use phase::{announce, finish, stage, switch};

const CERTIFICATE_KEY: &str = "ca.crt";
const PRIVATE_KEY_KEY: &str = "ca.key";
const TRUST_DOMAIN_KEY: &str = "trust-domain";

/// Lifetime of the hub's own certificate.
pub const HUB_CERTIFICATE_LIFE: Duration = Duration::from_secs(90 * 24 * 60 * 60);
const AUTHORITY_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Attempts to read or create the Secret. Limits the retries if another client keeps creating and deleting
/// it.
const TRIES: usize = 3;
/// OID of the subject attribute serialNumber.
const SUBJECT_SERIAL_NUMBER: &[u64] = &[2, 5, 4, 5];

#[derive(Debug, Error)]
pub enum AuthorityError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "Secret {namespace}/{CA_SECRET} is deleted repeatedly; stop the process that deletes it"
    )]
    DeletedRepeatedly { namespace: String },
    #[error(
        "Secret {namespace}/{CA_SECRET} is not valid: {problem}; restore it from a backup. Otherwise, delete it and restart the hub, which creates a new CA, and enroll every agent again"
    )]
    Unusable {
        namespace: String,
        problem: &'static str,
    },
    #[error("{0:?} is not a trust domain; use lower-case letters, digits, '.', '-' or '_'")]
    TrustDomain(String),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("a certificate for cluster {name:?} with UID {uid:?} cannot be written")]
    Subject { name: String, uid: String },
    #[error("signing a certificate failed")]
    Sign(#[source] rcgen::Error),
}

/// The content of the Secret.
pub type SecretData = BTreeMap<String, ByteString>;

/// Generates the content of a Secret with a new CA.
pub fn generate_data(trust_domain: &str, now: Timestamp) -> Result<SecretData, AuthorityError> {
    if !is_trust_domain(trust_domain) {
        return Err(AuthorityError::TrustDomain(trust_domain.to_owned()));
    }
    let key = KeyPair::generate().map_err(AuthorityError::Sign)?;
    let mut params = base_params(now);
    params
        .distinguished_name
        .push(DnType::CommonName, "krypton-hub CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(after(now, AUTHORITY_LIFE));
    let certificate = params.self_signed(&key).map_err(AuthorityError::Sign)?;
    let data = [
        (CERTIFICATE_KEY, certificate.pem()),
        (PRIVATE_KEY_KEY, key.serialize_pem()),
        (TRUST_DOMAIN_KEY, trust_domain.to_owned()),
    ];
    let entry = |(key, text): (&str, String)| (key.to_owned(), ByteString(text.into_bytes()));
    Ok(data.map(entry).into())
}

/// The CA with its key.
#[derive(Debug)]
pub struct Authority {
    trust_domain: String,
    /// The signing root comes first. The others are trusted during a rotation.
    roots: Vec<CertificateDer<'static>>,
    issuer: Issuer<'static, KeyPair>,
    /// Expiry time of the signing root.
    not_after: Timestamp,
    /// The phase of the rotation when the Secret was read.
    phase: RotationPhase,
    /// Epoch of the leader term in which this hub read the Secret. No leader before the first term changed it.
    epoch: AtomicU64,
}

impl Authority {
    /// Loads the CA, or creates it if it doesn't exist. If two hubs create one, one succeeds.
    pub async fn load_or_create(
        client: Client,
        namespace: &str,
        trust_domain_if_new: &str,
    ) -> Result<Self, AuthorityError> {
        let api: Api<Secret> = Api::namespaced(client, namespace);
        let unusable = |problem| AuthorityError::Unusable {
            namespace: namespace.to_owned(),
            problem,
        };
        for _ in 0..TRIES {
            if let Some(secret) = read_secret(&api, namespace).await? {
                let data = secret.data.unwrap_or_default();
                return Self::from_data(&data, clock::wall()).map_err(unusable);
            }
            let now = clock::wall();
            let data = generate_data(trust_domain_if_new, now)?;
            match create_secret(&api, namespace, data.clone()).await {
                Ok(()) => {
                    tracing::info!(
                        secret = %format_args!("{namespace}/{CA_SECRET}"),
                        trust_domain = trust_domain_if_new,
                        "created the hub's CA; back up this Secret"
                    );
                    return Self::from_data(&data, now).map_err(unusable);
                }
                Err(error) if error.code() == Some(409) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let namespace = namespace.to_owned();
        Err(AuthorityError::DeletedRepeatedly { namespace })
    }

    /// Generates a CA without storing it.
    pub fn generate(trust_domain: &str, now: Timestamp) -> Result<Self, AuthorityError> {
        Self::from_data(&generate_data(trust_domain, now)?, now)
            .map_err(|_| AuthorityError::Sign(rcgen::Error::CouldNotParseCertificate))
    }

    /// Reads the content of a Secret in any phase of a rotation. The error completes a sentence about the
    /// Secret.
    pub fn from_data(data: &SecretData, now: Timestamp) -> Result<Self, &'static str> {
        let required = |key, problem| text(data, key).ok_or(problem);
        let pem = required(CERTIFICATE_KEY, "it has no ca.crt")?;
        let key = required(PRIVATE_KEY_KEY, "it has no ca.key")?;
        let trust_domain = required(TRUST_DOMAIN_KEY, "it has no trust-domain")?.trim();
        if !is_trust_domain(trust_domain) {
            return Err("its trust-domain is invalid");
        }
        let key = KeyPair::from_pem(key).map_err(|_| "its ca.key is not a private key in PEM")?;
        let invalid_certificate = "its ca.crt is not a certificate in PEM";
        let roots = CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| invalid_certificate)?;
        let signing = roots.first().ok_or(invalid_certificate)?;
        let (_, certificate) =
            X509Certificate::from_der(signing).map_err(|_| invalid_certificate)?;
        if !certificate.is_ca() {
            return Err("the first certificate of its ca.crt is not a CA");
        }
        if certificate.public_key().raw != key.subject_public_key_info() {
            return Err("its ca.key does not match the first certificate of its ca.crt");
        }
        let not_after = Timestamp::from_second(certificate.validity().not_after.timestamp())
            .map_err(|_| invalid_certificate)?;
        if not_after <= now {
            return Err("its CA has expired");
        }
        let issuer = Issuer::from_ca_cert_der(signing, key).map_err(|_| invalid_certificate)?;
        Ok(Self {
            trust_domain: trust_domain.to_owned(),
            roots,
            issuer,
            not_after,
            phase: stage(data).map_or(RotationPhase::Steady, |stage| stage.phase),
            epoch: AtomicU64::new(1),
        })
    }

    /// Whether no other leader can have changed the CA since this hub read it. `epoch` is that of this hub's term.
    pub fn is_current(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Relaxed) >= epoch
    }

    pub fn phase(&self) -> RotationPhase {
        self.phase
    }

    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// All trusted roots.
    pub fn roots(&self) -> Vec<CertificateDer<'static>> {
        self.roots.clone()
    }

    /// The signing root.
    pub fn signing_root(&self) -> Option<RootDigest> {
        self.roots.first().map(|root| RootDigest::from_der(root))
    }

    /// The validity of the signing root.
    pub(crate) fn validity(&self) -> Option<Validity> {
        Validity::of_certificate(self.roots.first()?)
    }

    /// Returns the root that signed this certificate, if it is one of ours.
    pub fn issuer_of(&self, certificate: &[u8]) -> Option<RootDigest> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let root = self.roots.iter().find(|root| {
            let has_signed = |root: &X509Certificate<'_>| {
                certificate.issuer() == root.subject()
                    && certificate
                        .verify_signature(Some(root.public_key()))
                        .is_ok()
            };
            X509Certificate::from_der(root).is_ok_and(|(_, root)| has_signed(&root))
        })?;
        Some(RootDigest::from_der(root))
    }

    /// Returns the roots in PEM, without any other text of the Secret.
    pub fn ca_pem(&self) -> String {
        pem(&self.roots)
    }

    /// Issues a server certificate for the hub, with a new key.
    pub fn hub_credential(&self, now: Timestamp) -> Result<Credential, AuthorityError> {
        let key = KeyPair::generate().map_err(AuthorityError::Sign)?;
        let id = SpiffeId::hub(&self.trust_domain);
        let mut params = self.common_params(&id, now, HUB_CERTIFICATE_LIFE)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "krypton-hub");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(AuthorityError::Sign)?;
        Ok(Credential {
            certificates: vec![certificate.into()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        })
    }

    /// Issues a certificate to the member `name`, whose EdgeCluster has `uid`, for the key of `request`.
    /// Returns the chain without the roots, the member's certificate first.
    pub fn sign_agent(
        &self,
        request: &[u8],
        name: &str,
        uid: &str,
        now: Timestamp,
        life: Duration,
    ) -> Result<Vec<CertificateDer<'static>>, AuthorityError> {
        let key = csr::public_key(request)?;
        let invalid_subject = || AuthorityError::Subject {
            name: name.to_owned(),
            uid: uid.to_owned(),
        };
        let id = SpiffeId::cluster(&self.trust_domain, name);
        if SpiffeId::parse(&id.to_string()).is_none() || uid.is_empty() || uid.len() > 64 {
            return Err(invalid_subject());
        }
        let mut params = self.common_params(&id, now, life)?;
        let uid = PrintableString::try_from(uid).map_err(|_| invalid_subject())?;
        let subject = &mut params.distinguished_name;
        subject.push(DnType::CommonName, name);
        subject.push(
            DnType::from_oid(SUBJECT_SERIAL_NUMBER),
            DnValue::PrintableString(uid),
        );
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(AuthorityError::Sign)?;
        Ok(vec![certificate.into()])
    }

    /// The common parameters of all certificates that this CA signs. None outlives the CA.
    fn common_params(
        &self,
        id: &SpiffeId,
        now: Timestamp,
        life: Duration,
    ) -> Result<CertificateParams, AuthorityError> {
        let uri = id.to_string().try_into().map_err(AuthorityError::Sign)?;
        let end = after(now, life).min(self.not_after);
        let mut params = base_params(now);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(end);
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

fn text<'a>(data: &'a SecretData, key: &str) -> Option<&'a str> {
    data.get(key)
        .and_then(|value| std::str::from_utf8(&value.0).ok())
}

async fn read_secret(api: &Api<Secret>, namespace: &str) -> Result<Option<Secret>, ApiError> {
    let attempt = format!("reading Secret {namespace}/{CA_SECRET}");
    call(attempt, api.get_opt(CA_SECRET)).await
}

async fn create_secret(
    api: &Api<Secret>,
    namespace: &str,
    data: SecretData,
) -> Result<(), ApiError> {
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(CA_SECRET.to_owned()),
            ..ObjectMeta::default()
        },
        data: Some(data),
        ..Secret::default()
    };
    let params = PostParams::default();
    let request = api.create(&params, &secret);
    let attempt = format!("creating Secret {namespace}/{CA_SECRET}");
    call(attempt, request).await.map(drop)
}

/// Parameters without a name, valid since one day ago.
fn base_params(now: Timestamp) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let not_before = since_1970(now).saturating_sub(BACK_DATED);
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + not_before;
    // A positive serial number of full length. By default, rcgen would use the key's digest.
    let mut serial: [u8; 16] = chance::secret();
    serial[0] = serial[0] & 0x3f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params
}

fn since_1970(time: Timestamp) -> Duration {
    Duration::from_secs(time.as_second().max(0).unsigned_abs())
}

fn after(now: Timestamp, life: Duration) -> Timestamp {
    now.saturating_add(life).unwrap_or(Timestamp::MAX)
}

fn is_trust_domain(text: &str) -> bool {
    SpiffeId::parse(&SpiffeId::hub(text).to_string()).is_some()
}

pub(crate) mod rotation_controller;
#[cfg(test)]
mod tests;
