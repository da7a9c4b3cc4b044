//! Generates the keys, certificates, tokens and kubeconfigs of one cluster.

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use serde::{Deserialize, Serialize};

/// Subject alternative names of the API server's certificate.
const APISERVER_NAMES: [&str; 4] = [
    "127.0.0.1",
    "localhost",
    "kubernetes.default.svc",
    "kubernetes.default",
];

/// A certificate and its key, in PEM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// All keys and certificates in PEM. P-256 keys are fast to generate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Credentials {
    pub(super) ca: String,
    pub(super) apiserver: Identity,
    admin: Identity,
    pub(super) service_account_key: String,
    pub(super) service_account_public_key: String,
}

impl Credentials {
    pub(super) fn generate() -> Result<Self> {
        Self::try_generate().context("generating the cluster's certificates")
    }

    fn try_generate() -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject("krypton-test-ca", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;

        let mut params = CertificateParams::new(APISERVER_NAMES.map(str::to_owned))?;
        params.distinguished_name = subject("kube-apiserver", None);
        let apiserver = issue(params, ExtendedKeyUsagePurpose::ServerAuth, &ca)?;

        let mut params = CertificateParams::default();
        params.distinguished_name = subject("admin", Some("system:masters"));
        let admin = issue(params, ExtendedKeyUsagePurpose::ClientAuth, &ca)?;

        let service_account = KeyPair::generate()?;
        Ok(Self {
            ca: ca.pem(),
            apiserver,
            admin,
            service_account_key: service_account.serialize_pem(),
            service_account_public_key: service_account.public_key_pem(),
        })
    }

    /// Returns a kubeconfig with the administrator's client certificate inline.
    pub(super) fn kubeconfig(&self, name: &str, server: &str) -> String {
        let user = format!(
            "client-certificate-data: {}\n    client-key-data: {}",
            BASE64_STANDARD.encode(&self.admin.certificate),
            BASE64_STANDARD.encode(&self.admin.key),
        );
        self.kubeconfig_for_user(name, server, &user)
    }

    pub(super) fn kubeconfig_for_user(&self, name: &str, server: &str, user: &str) -> String {
        let ca = BASE64_STANDARD.encode(&self.ca);
        format!(
            "apiVersion: v1
kind: Config
current-context: {name}
contexts:
- name: {name}
  context: {{cluster: {name}, user: admin}}
clusters:
- name: {name}
  cluster:
    server: {server}
    certificate-authority-data: {ca}
users:
- name: admin
  user:
    {user}
"
        )
    }
}

/// Returns 128 random bits in hex.
pub(super) fn token() -> Result<String> {
    let mut bits = [0; 16];
    rustls::crypto::aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut bits)
        .ok()
        .context("generating a token")?;
    Ok(bits.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn subject(common_name: &str, organisation: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    if let Some(organisation) = organisation {
        name.push(DnType::OrganizationName, organisation);
    }
    name
}

fn issue(
    mut params: CertificateParams,
    usage: ExtendedKeyUsagePurpose,
    ca: &CertifiedIssuer<'_, KeyPair>,
) -> Result<Identity, rcgen::Error> {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok(Identity {
        certificate: params.signed_by(&key, ca)?.pem(),
        key: key.serialize_pem(),
    })
}
